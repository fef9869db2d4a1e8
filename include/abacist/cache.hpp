// Key/value caches: appending what a step has made, and rotary position embedding. On the host.
#pragma once

#include <cstdint>

#include "abacist/status.hpp"
#include "abacist/tensor.hpp"

namespace abacist {

/// Which elements of a head turn together: neighbours (2i, 2i + 1), or (i, i + d_rot / 2).
enum class RotaryStyle : std::uint8_t { interleaved, half_split };

/// Rotary position embedding (Su et al. 2021): a pair (a, b) of the first d_rot elements of a head
/// at position p becomes (a cos - b sin, a sin + b cos), computed in float; elements past d_rot
/// stay. Absent tables: no rotation.
struct Rotary {
  ConstTensor cos{};  ///< f32 [positions, d_rot / 2]
  ConstTensor sin{};  ///< as cos
  RotaryStyle style = RotaryStyle::interleaved;

  bool present() const noexcept { return cos.present() || sin.present(); }
};

/// New keys and values, and the cache that takes them. All of one dtype: f32, bf16 or f16.
struct AppendTensors {
  ConstTensor k;        ///< [b, s_new, h_k, d_qk]
  ConstTensor v;        ///< [b, s_new, h_k, d_v]
  Tensor k_cache;       ///< [b, s_k, h_k, d_qk], or pages: [pages, page_size, h_k, d_qk]
  Tensor v_cache;       ///< [b, s_k, h_k, d_v],  or pages: [pages, page_size, h_k, d_v]
  ConstTensor lengths;  ///< i32 [b], contiguous: keys that each sequence has already; row r of
                        ///< sequence n becomes key lengths[n] + r, which is its position, too
  ConstTensor block_table{};  ///< with pages: i32 [b, max_pages], as in ForwardTensors
};

/// Writes k, rotated, and v behind the keys that each sequence has. The caller raises the lengths
/// (by s_new) for the next forward pass. A cache without room, a page id outside the pool, a
/// position past the rotary tables or a block table that sends two new keys to the same row of the
/// same page is an error, and then nothing has been written. (Pages that are read alone may be
/// shared, and so may a page that several sequences fill at different rows.)
///
///     Status s = append({.k = k, .v = v, .k_cache = kc, .v_cache = vc, .lengths = lengths},
///                       {.cos = cos, .sin = sin, .style = RotaryStyle::half_split});
ABACIST_API Status append(const AppendTensors& tensors, const Rotary& rotary = {});

/// Rotates x [b, s, h, d] to `out`, of the same shape and dtype: row r of sequence n stands at
/// position positions[n] + r. `out` may be x itself (same data, same strides).
ABACIST_API Status rotate(const ConstTensor& x, const ConstTensor& positions, const Rotary& rotary,
                          const Tensor& out);

}  // namespace abacist
