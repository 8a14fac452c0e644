// The Python module `branchline.engine._core`. Its interface is engine/branchline/engine/_core.pyi; keep the two in step.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "branchline/branch_tree.hpp"
#include "branchline/copy_pages.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace branchline {
namespace {

using TokensArg = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HandlesArg = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object fork_many(BranchTree& self, Handle branch, int64_t count) {
    self.require_fork(branch, count);
    NewHandles made = new_handles(count);
    self.fork_many(branch, count, made.data);
    return std::move(made.array);
}

nb::object lend_many(BranchTree& self, int64_t count, int64_t num_pages, int64_t tenant) {
    self.require_lend(count, num_pages, tenant);
    NewHandles made = new_handles(count);
    self.lend_many(count, num_pages, tenant, made.data);
    return std::move(made.array);
}

nb::dict counters(const BranchTree& self) {
    const Counters c = self.counters();
    nb::dict out;
    out["pages_total"] = c.pages_total;
    out["pages_free"] = c.pages_free;
    out["pages_used"] = c.pages_used;
    out["branches"] = c.branches;
    out["segments"] = c.segments;
    out["forks"] = c.forks;
    out["steps"] = c.steps;
    out["step_tokens"] = c.step_tokens;
    out["copies"] = c.copies;
    out["evicted_pages"] = c.evicted_pages;
    out["matched_tokens"] = c.matched_tokens;
    out["pages_cached"] = c.pages_cached;
    return out;
}

int64_t copy_pool_pages(const nb::ndarray<nb::ndim<6>, nb::c_contig, nb::device::cpu>& pool, const TokensArg& src,
                        const TokensArg& dst, const TokensArg& tokens) {
    const auto count = static_cast<int64_t>(src.shape(0));
    const auto pages = static_cast<int64_t>(pool.shape(0));
    const auto page_tokens = static_cast<int64_t>(pool.shape(4));
    if (static_cast<int64_t>(dst.shape(0)) != count || static_cast<int64_t>(tokens.shape(0)) != count) {
        throw std::invalid_argument("src, dst and tokens have " + std::to_string(count) + ", " + std::to_string(dst.shape(0)) +
                                    " and " + std::to_string(tokens.shape(0)) + " entries: expected as many of each");
    }
    // Copied first, so that another thread can't change what was checked.
    const std::vector<int32_t> from(src.data(), src.data() + count);
    const std::vector<int32_t> to(dst.data(), dst.data() + count);
    const std::vector<int32_t> filled(tokens.data(), tokens.data() + count);
    for (std::size_t i = 0; i < from.size(); ++i) {
        if (from[i] < 0 || from[i] >= pages || to[i] < 0 || to[i] >= pages || from[i] == to[i] || filled[i] < 0 ||
            filled[i] > page_tokens) {
            throw std::invalid_argument("copy " + std::to_string(i) + ": " + std::to_string(filled[i]) + " tokens of page " +
                                        std::to_string(from[i]) + " to page " + std::to_string(to[i]) + ": expected two of " +
                                        std::to_string(pages) + " pages and at most " + std::to_string(page_tokens) + " tokens");
        }
    }
    const PoolLayout layout{const_cast<char*>(static_cast<const char*>(pool.data())), pages,
                            static_cast<int64_t>(pool.shape(1) * pool.shape(2) * pool.shape(3)), page_tokens,
                            static_cast<int64_t>(pool.shape(5) * pool.itemsize())};
    nb::gil_scoped_release unlocked;
    return copy_pages(layout, from.data(), to.data(), filled.data(), count);
}

template <int32_t* (Batch::*Data)(), int32_t (Batch::*Size)() const, int Extra = 0>
nb::object batch_view(nb::handle self) {
    Batch& batch = nb::cast<BranchTree&>(self).batch();
    return view_of(self, (batch.*Data)(), (batch.*Size)() + Extra);
}

nb::object table_view(nb::handle self) {
    Batch& batch = nb::cast<BranchTree&>(self).batch();
    return view_of(self, batch.table(), batch.max_batch(), batch.table_width());
}

std::tuple<nb::object, nb::object, nb::object, nb::object> level_views(nb::handle self, int64_t index) {
    const LevelArrays& level = nb::cast<BranchTree&>(self).level(index);
    const int32_t groups = level.num_groups;
    return {view_of(self, level.qo_indptr, groups + 1), view_of(self, level.kv_indptr, groups + 1),
            view_of(self, level.kv_indices, level.num_indices), view_of(self, level.last_page_len, groups)};
}

void copy_array(nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> dst,
                const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& src) {
    if (dst.shape(0) != src.shape(0)) {
        throw std::invalid_argument("dst has " + std::to_string(dst.shape(0)) + " bytes, src " + std::to_string(src.shape(0)) +
                                    ": expected as many");
    }
    copy_past_caches(reinterpret_cast<char*>(dst.data()), reinterpret_cast<const char*>(src.data()),
                     static_cast<int64_t>(src.shape(0)));
}

/// Makes the exception classes and translates the core's errors to them.
void bind_errors(nb::module_& m) {
    static PyObject* classes[5];
    const auto make = [&](int i, const char* name, const char* doc, nb::handle bases) {
        const std::string full = std::string("branchline.engine._core.") + name;
        classes[i] = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
        if (classes[i] == nullptr) nb::raise_python_error();
        m.attr(name) = nb::handle(classes[i]);
    };
    make(0, "CoreError", "Base of the core's errors.", nb::handle(PyExc_Exception));
    const nb::handle base(classes[0]);
    make(1, "ReleasedHandleError", "The handle names a branch that was released, or none that ever was.", base);
    make(2, "OutOfPagesError", "Not enough free pages. Nothing was changed.", base);
    make(3, "OutOfBranchesError", "`max_branches` are in use. Nothing was changed.", base);
    make(4, "BatchError", "A slot, a row or a plan isn't in the state that the call needs.",
         nb::make_tuple(base, nb::handle(PyExc_ValueError)));
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const ReleasedHandleError& e) {
            PyErr_SetString(classes[1], e.what());
        } catch (const OutOfPagesError& e) {
            PyErr_SetString(classes[2], e.what());
        } catch (const OutOfBranchesError& e) {
            PyErr_SetString(classes[3], e.what());
        } catch (const BatchError& e) {
            PyErr_SetString(classes[4], e.what());
        } catch (const CoreError& e) {
            PyErr_SetString(classes[0], e.what());
        }
    });
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "The compiled core: page pool and branch tree.";
    nb::set_leak_warnings(false);  // a view of a tree in some module's globals at exit isn't a leak
    bind_errors(m);

    nb::class_<BranchTree>(m, "BranchTree", nb::is_final(),
                           "Pages, segments and branches of one engine, and the arrays of its steps.")
        .def(
            "__init__",
            [](BranchTree* self, int64_t num_pages, int64_t page_tokens, int64_t max_branches, int64_t max_batch,
               int64_t max_step_tokens, int64_t max_levels, int64_t level_cost_pages, int64_t table_width,
               bool zero_used) {
                new (self) BranchTree(TreeSizes{num_pages, page_tokens, max_branches, max_batch, max_step_tokens, max_levels,
                                                level_cost_pages, table_width, zero_used});
            },
            "num_pages"_a, nb::kw_only(), "page_tokens"_a = TreeSizes{}.page_tokens, "max_branches"_a = TreeSizes{}.max_branches,
            "max_batch"_a = TreeSizes{}.max_batch, "max_step_tokens"_a = TreeSizes{}.max_step_tokens,
            "max_levels"_a = TreeSizes{}.max_levels, "level_cost_pages"_a = TreeSizes{}.level_cost_pages,
            "table_width"_a = TreeSizes{}.table_width, "zero_used"_a = TreeSizes{}.zero_used)
        // Functions without named parameters are called faster; the stub marks them positional-only.
        .def("nop", [](BranchTree&) {})
        .def("root", &BranchTree::root, "tenant"_a = 0)
        .def("fork", &BranchTree::fork)
        .def("fork_many", &fork_many)
        .def("release", &BranchTree::release)
        .def(
            "release_many",
            [](BranchTree& self, const HandlesArg& branches) {
                self.release_many(branches.data(), static_cast<int64_t>(branches.shape(0)));
            },
            nb::arg("branches").noconvert())
        .def("truncate", &BranchTree::truncate)
        .def("length", &BranchTree::length)
        .def("shared_length", &BranchTree::shared_length)
        .def("tokens", [](BranchTree& self, Handle branch) { return copy_of(self.tokens(branch)); }, "branch"_a)
        .def("pages", [](BranchTree& self, Handle branch) { return copy_of(self.pages(branch)); }, "branch"_a)
        .def(
            "describe",
            [](BranchTree& self, Handle branch) {
                const BranchSizes s = self.describe(branch);
                return std::make_tuple(s.num_tokens, s.shared_tokens, s.shared_pages, s.private_pages, s.depth);
            },
            "branch"_a)
        .def("pages_needed", &BranchTree::pages_needed)
        .def("lend", &BranchTree::lend)
        .def("lend_many", &lend_many)
        .def("give_back", [](BranchTree& self, Handle lease) { self.give_back(&lease, 1); })
        .def(
            "give_back_many",
            [](BranchTree& self, const HandlesArg& leases) {
                self.give_back(leases.data(), static_cast<int64_t>(leases.shape(0)));
            },
            nb::arg("leases").noconvert())
        .def("leased_pages", [](const BranchTree& self, Handle lease) { return copy_of(self.leased_pages(lease)); })
        .def("tenant_pages", &BranchTree::tenant_pages)
        .def("tenant_cached_pages", &BranchTree::tenant_cached_pages)
        .def("take_used", [](BranchTree& self) { return copy_of(self.take_used()); })
        .def(
            "match",
            [](BranchTree& self, const TokensArg& tokens, int64_t tenant) {
                return self.match(tokens.data(), static_cast<int64_t>(tokens.shape(0)), tenant);
            },
            nb::arg("tokens").noconvert(), "tenant"_a = 0)
        .def(
            "peek",
            [](const BranchTree& self, const TokensArg& tokens, int64_t tenant) {
                const Found found = self.peek(tokens.data(), static_cast<int64_t>(tokens.shape(0)), tenant);
                return std::make_tuple(found.tokens, found.idle_pages);
            },
            nb::arg("tokens").noconvert(), "tenant"_a = 0)
        .def(
            "graft",
            [](BranchTree& self, Handle branch, const TokensArg& tokens) {
                const Graft graft = self.graft(branch, tokens.data(), static_cast<int64_t>(tokens.shape(0)));
                return std::make_tuple(graft.src, graft.dst, graft.tokens);
            },
            "branch"_a, nb::arg("tokens").noconvert())
        .def(
            "extend",
            [](BranchTree& self, Handle branch, const TokensArg& tokens) {
                return copy_of(self.extend(branch, tokens.data(), static_cast<int64_t>(tokens.shape(0))));
            },
            "branch"_a, nb::arg("tokens").noconvert())
        .def(
            "private_part",
            [](BranchTree& self, Handle branch) {
                const auto [pages, tokens] = self.private_part(branch);
                return std::make_tuple(pages, tokens);
            })
        .def("insert", &BranchTree::insert)
        .def("evict", &BranchTree::evict)
        .def_prop_ro("counters", &counters)
        .def_prop_ro("table", &table_view)
        .def_prop_ro("table_lengths", &batch_view<&Batch::table_lengths, &Batch::max_batch>)
        .def("join", &BranchTree::join)
        .def("leave", &BranchTree::leave)
        .def(
            "prefill",
            [](BranchTree& self, Handle branch, int64_t slot, const TokensArg& tokens) {
                self.prefill(branch, slot, tokens.data(), static_cast<int64_t>(tokens.shape(0)));
            },
            "branch"_a, "slot"_a, nb::arg("tokens").noconvert())
        .def("plan", &BranchTree::plan)
        .def("commit", &BranchTree::commit)
        .def("rollback", &BranchTree::rollback)
        .def_prop_ro("next_tokens", &batch_view<&Batch::next_tokens, &Batch::max_batch>)
        .def_prop_ro("num_tokens", [](BranchTree& self) { return self.batch().num_tokens(); })
        .def_prop_ro("num_rows", [](BranchTree& self) { return self.batch().num_rows(); })
        .def_prop_ro("num_levels", [](BranchTree& self) { return self.batch().num_levels(); })
        .def_prop_ro("num_copies", [](BranchTree& self) { return self.batch().num_copies(); })
        .def_prop_ro("token_ids", &batch_view<&Batch::token_ids, &Batch::max_step_tokens>)
        .def_prop_ro("positions", &batch_view<&Batch::positions, &Batch::max_step_tokens>)
        .def_prop_ro("write_slots", &batch_view<&Batch::write_slots, &Batch::max_step_tokens>)
        .def_prop_ro("row_indptr", &batch_view<&Batch::row_indptr, &Batch::max_batch, 1>)
        .def_prop_ro("row_slots", &batch_view<&Batch::row_slots, &Batch::max_batch>)
        .def_prop_ro("copy_src", &batch_view<&Batch::copy_src, &Batch::max_batch>)
        .def_prop_ro("copy_dst", &batch_view<&Batch::copy_dst, &Batch::max_batch>)
        .def_prop_ro("copy_tokens", &batch_view<&Batch::copy_tokens, &Batch::max_batch>)
        .def("level", &level_views, "index"_a)
        .def_prop_ro("num_free_pages", [](BranchTree& self) { return self.tree().pool().num_free(); })
        .def_prop_ro("num_cached_pages", [](BranchTree& self) { return self.tree().idle_pages(); })
        .def_prop_ro("num_pages", [](BranchTree& self) { return self.tree().pool().num_pages(); })
        .def_prop_ro("num_branches", [](BranchTree& self) { return self.tree().num_branches(); })
        .def_prop_ro("num_segments", [](BranchTree& self) { return self.tree().num_segments(); })
        .def_prop_ro("page_tokens", [](BranchTree& self) { return self.tree().pool().page_tokens(); })
        .def_prop_ro("num_used_pages", [](BranchTree& self) { return static_cast<int32_t>(self.tree().pool().num_used()); })
        .def("check", &BranchTree::check);

    m.def("copy_pages", &copy_pool_pages, nb::arg("pool").noconvert(), nb::arg("src").noconvert(), nb::arg("dst").noconvert(),
          nb::arg("tokens").noconvert(), "Copy the filled tokens of pages.");
    m.def("copy_bytes", &copy_array, nb::arg("dst").noconvert(), nb::arg("src").noconvert(), "Copy past the caches.");
}

}  // namespace branchline
