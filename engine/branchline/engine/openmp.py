"""Bounds OpenMP's busy waiting. Import it before torch: the runtime reads its settings when it is loaded.

A thread that waits at the end of a parallel region spins, by default for milliseconds. Where another process wants that core
(Ray's own processes do), the region's last thread can't run and every operation waits for the scheduler: on 2 shared cores a
step took 5 to 15 times as long. A short spin keeps most of what spinning is good for.
"""

from __future__ import annotations

import os

SPIN_COUNT = 1000


def bound_spinning() -> None:
    """Set GNU OpenMP's spin count for this process, unless the environment says how to wait already."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


bound_spinning()
