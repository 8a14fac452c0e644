"""One local gateway (fake engine, no Ray) for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.orchestrator.local_gateway import LocalGateway, local_gateway


@pytest.fixture(scope="package")
def gateway() -> Iterator[LocalGateway]:
    with local_gateway() as running:
        yield running
