// What stands beside Q, K and V: slopes, sinks, bias, boolean mask, key lengths and pages; from
// files, or made up.
#pragma once

#include <cstdint>

#include "operands.hpp"
#include "options.hpp"

namespace abacist::cli {

/// Adds what the options name. Random operands are made of `seed`; with `data` false they are specs
/// alone, to be planned. With `score.page_size` K and V are moved into pages in random order, and
/// rows of pages that no key lies in are NaN. Throws UserError or FileError.
void add_features(Inputs& inputs, const ScoreArguments& score, std::uint64_t seed,
                  bool data = true);

/// The options, with the longest lengths where `cu_seqlens` are given.
Options options_for(const ScoreArguments& score, const Inputs& inputs);

/// The same problem without pages: K and V are [b, max_pages * page_size, h_k, d], copied key by
/// key, zeros past each length. Page ids must be in the pool.
Inputs without_pages(const Inputs& inputs);

/// The largest number of queries or keys of a sequence: of varlen inputs what cu_seqlens say, else
/// as the shapes say: s_q and s_k, or max_pages * page_size.
std::int64_t most_queries(const Inputs& inputs);
std::int64_t most_keys(const Inputs& inputs);

}  // namespace abacist::cli
