// A consumer warpgroup: 64 query rows, S = Q K^T, softmax, O += P V. kernel.cuh has the overview.
#pragma once
#include <cuda/ptx>

#include "../../ptx/sm90.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../tile/descriptor.cuh"
#include "../../tile/pipeline.cuh"
#include "epilogue.cuh"
#include "score.cuh"
#include "shared.cuh"
#include "softmax.cuh"

namespace abacist::cuda::sm90 {

// One consumer warpgroup. With chained tiles, the last P V of a query tile and its epilogue are
// left pending until the next tile's first Q K^T has been issued: the tensor cores do not drain in
// between.
template <ForwardTile Tile, class Element, bool Modified>
__device__ __forceinline__ void consume(const ForwardParams& p, SharedStorage<Tile>& shared) {
  constexpr int kKeys = Tile.keys;
  const int group = uniform(threadIdx.x / 128);
  auto q_address = [&](int group) {
    return uint32_t(__cvta_generic_to_shared(shared.q[0])) + group * 64 * Tile.qk_panels() * 128;
  };
  const tile::Descriptor q_base(q_address(group));
  const tile::Descriptor k_base(uint32_t(__cvta_generic_to_shared(shared.k[0])));
  const tile::Descriptor v_base(uint32_t(__cvta_generic_to_shared(shared.v[0])), kKeys * 128);
  const float scale_log2 = p.scale_log2;

  float s[kKeys / 2];                        // [64, keys] over the warpgroup
  float o[Tile.d_v / 2] = {};                // [64, d_v]
  uint32_t probability[kKeys / 16][4] = {};  // P as A fragments
  uint32_t q_fragments[Tile.q_steps ? Tile.q_steps : 1][4];
  RowState state{};
  int message = 0;  // number of the one at work on; each has its Q
  auto q_at = [&] {
    return tile::RingPosition<Tile.q_stages>{message & (Tile.q_stages - 1),
                                             uint32_t(message / Tile.q_stages & 1)};
  };
  int key_tile = 0;    // number of the next K tile; the next V tile is the one before
  int accumulate = 0;  // 0: the next P V is the first of its query tile
  // The tile whose last P V and epilogue are still to do: its message, the keys of the sequence in
  // its last V and its traits (in one register: a second would spill at d 128). Or one of these.
  constexpr int kNone = -1, kUnreadV = -2;   // kUnreadV: the last V tile is to be passed over
  constexpr int kMessages = 2 * kWorkSlots;  // they are counted modulo that
  constexpr int kValid = kMessages, kTraits = kMessages * 256;
  static_assert(kKeys < 256);
  int pending = kNone;

  static_assert(Tile.stages == 2 || Tile.stages == 4);
  constexpr bool kTight = Tile.d_qk == 256 && kKeys == 80;  // no register is left
  // Nor in these kernels of modified scores: what is needed seldom is read again.
  constexpr bool kReadsBounds = Modified && Tile.d_qk >= 128;
  constexpr bool kWideModified = Modified && Tile.d_qk > 128;
  // Barriers are looked at ahead of their waits.
  constexpr bool looks_ahead = !kTight;
  auto position = [](int number) {
    return tile::RingPosition<Tile.stages>{number & (Tile.stages - 1),
                                           uint32_t(number / Tile.stages & 1)};
  };
  auto group_again = [&] { return kWideModified ? int(ptx::thread_again() / 128) : group; };
  auto uniform_group = [&] { return kWideModified ? uniform(ptx::thread_again() / 128) : group; };
  auto my_turn = [&] { ptx::named_barrier_sync<256>(1 + group_again()); };
  auto next_turn = [&] {
    const int after = group_again() + 1;
    ptx::named_barrier_arrive<256>(1 + (after == Tile.groups ? 0 : after));
  };
  auto issue_qk = [&] {
    const uint32_t q = q_at().stage * Tile.q_bytes(), k = position(key_tile).stage * Tile.k_bytes();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile.d_qk / 16; ++step) {
      const uint64_t b = k_base.at(k + tile::k_major_step_bytes(step, kKeys));
      if (step < Tile.q_steps) {
        ptx::wgmma_rs<Element, 0>(s, q_fragments[step < Tile.q_steps ? step : 0], b, step);
      } else {
        ptx::wgmma_ss<Element, 0>(s, q_base.at(q + tile::k_major_step_bytes(step, 64)), b, step);
      }
    }
    ptx::wgmma_commit();
  };
  auto issue_pv = [&] {
    const uint32_t v = position(key_tile - 1).stage * Tile.v_bytes();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      ptx::wgmma_rs<Element, 1>(o, probability[step],
                                v_base.at(v + tile::mn_major_step_bytes(step)),
                                step ? 1 : accumulate);
    }
    ptx::wgmma_commit();
    accumulate = 1;
  };
  auto pack_steps = [&](int begin, int end) {  // of 16 keys
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      if (i < begin || i >= end) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        probability[i][j] = ptx::pack<Element>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    }
  };
  auto pack_probability = [&] { pack_steps(0, kKeys / 16); };
  // Rows of V past the sequence's end hold anything, NaN included, and 0 * NaN is NaN. TMA writes
  // zeros past the tensor only. Every warpgroup clears them for itself: the same zeros.
  auto wait_last_v = [&](bool known_full = false) {
    if (!known_full) shared.v_ring.wait_full(position(key_tile - 1));
    const int valid = pending / kValid % 256;
    if (valid >= kKeys) return;
    char* v = shared.v[position(key_tile - 1).stage];
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < (kKeys - valid) * Tile.v_panels() * 8; i += 128) {
      const int r = valid + i / (Tile.v_panels() * 8), chunk = i % (Tile.v_panels() * 8);
      *reinterpret_cast<uint4*>(v + (chunk / 8) * kKeys * 128 + r * 128 + (chunk % 8) * 16) =
          uint4{};
    }
    ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
    ptx::named_barrier_sync<128>(8 + group_again());
  };
  // The lane, and this thread's first row of the tile (the other is 8 below). With three groups
  // they are read again where they are needed: kept in registers, they would spill.
  constexpr bool kRead = Tile.groups == 3 || Tile.d_qk > 128 || (Modified && Tile.d_qk == 128);
  const int kept_lane = threadIdx.x % 32, kept_row = threadIdx.x / 32 * 16 + kept_lane / 4;
  auto lane = [&] { return kRead ? ptx::thread_again() % 32 : kept_lane; };
  auto first_row = [&] {
    return kRead ? ptx::thread_again() / 32 * 16 + ptx::thread_again() % 32 / 4 : kept_row;
  };
  auto staging = [&] {  // of this warp
    const int warp = uniform((kRead ? ptx::thread_again() : threadIdx.x) / 32);
    return shared.o + warp * (Tile.o_bytes() / (Tile.groups * 4));
  };
  auto end_pending = [&] {
    const Work& w = shared.works[pending % kWorkSlots];
    if (pending & kTraits * Work::plain_end)
      return end_plain_rows<Element>(w, first_row(), lane(), state);
    return end_rows<Tile, Element>(p, w, first_row(), lane(), state);
  };
  auto store_pending = [&](int finished, const RowEnds& ends) {
    const int slot = finished % kWorkSlots;
    Work& w = shared.works[slot];
    store_rows<Tile, Element>(p, w, uniform_group(), lane(), o, ends, staging(), &shared.redo[slot],
                              finished & kTraits * Work::plain_store);
  };
  // V of the key tile before `key_tile - back`, which nobody of this warpgroup reads.
  auto pass_v = [&](int back) {
    if (pending == kUnreadV) shared.v_ring.wait_full(position(key_tile - back));
    if (pending != kNone) shared.v_ring.release(position(key_tile - back));
  };
  // A turn without Q K^T: what is pending is finished, and (passing) a key tile goes by unread.
  auto step_alone = [&](bool passing) {
    if (passing) shared.k_ring.wait_full(position(key_tile));
    if (pending >= 0) wait_last_v();
    RowEnds ends{};
    my_turn();
    if (pending >= 0) {
      issue_pv();
      next_turn();
      ends = end_pending();
      ptx::wgmma_wait<0>();
      ptx::hold_registers(o);
    } else {
      next_turn();
    }
    pass_v(1);
    const int finished = pending;
    pending = kNone;
    if (passing) {
      shared.k_ring.release(position(key_tile));
      ++key_tile;
      pending = kUnreadV;
    }
    if (finished >= 0) store_pending(finished, ends);
  };
  auto release_q = [&] { shared.q_ring.release(q_at()); };

  if (group == Tile.groups - 1) ptx::named_barrier_arrive<256>(1);  // the first turn is group 0's
  for (;; message = (message + 1) & (kMessages - 1)) {
    const int slot = message & (kWorkSlots - 1);
    key_tile = uniform(key_tile);
    // The next key tile's K is there, too, as a rule, and so is the last V.
    const bool q_full = looks_ahead && shared.q_ring.is_full(q_at());
    const bool k_full = looks_ahead && shared.k_ring.is_full(position(key_tile));
    const bool v_full = looks_ahead && shared.v_ring.is_full(position(key_tile - 1));
    if (!q_full) shared.q_ring.wait_full(q_at());
    Work& w = shared.works[slot];
    const Work::Part& part = w.parts[uniform_group()];
    const int traits = uniform(part.traits);
    const int begin = uniform(w.begin), end = uniform(part.end), mode = uniform(w.mode);
    const int kept_begin = uniform(part.frozen_begin), kept_end = uniform(part.frozen_end);
    auto frozen_begin = [&] { return kReadsBounds ? uniform(part.frozen_begin) : kept_begin; };
    auto frozen_end = [&] { return kTight || kReadsBounds ? uniform(part.frozen_end) : kept_end; };
    auto compute = [&] {
      if constexpr (Tile.q_steps > 0) {
#pragma unroll
        for (int step = 0; step < Tile.q_steps; ++step) {
          const unsigned thread = kRead ? ptx::thread_again() : threadIdx.x;
          const int r = thread / 32 % 4 * 16 + thread % 16, chunk = step * 2 + thread % 32 / 16;
          ptx::ldmatrix_x4(q_fragments[step],
                           q_address(group_again()) + q_at().stage * Tile.q_bytes() +
                               (chunk / 8) * 8192 + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
        }
        if constexpr (Tile.q_registers()) release_q();
      }
      auto alibi_rows = [&] {
        AlibiRows rows{};
        if (!Modified || !p.alibi_slopes) return rows;
        // In a split keys count from its first one.
        const int aligned = Tile.splits ? w.first + p.left : p.top_left ? 0 : w.len_k - w.len_q;
        const int shift = aligned - 2 * (lane() % 4);
        constexpr float kLog2E = 1.4426950408889634f;
        // One after the other: few registers are left.
        rows.slope0 = p.alibi_slopes[RowPlace<Tile.packs>(p, w, first_row()).head] * kLog2E;
        asm volatile("" ::: "memory");
        rows.slope1 = p.alibi_slopes[RowPlace<Tile.packs>(p, w, first_row() + 8).head] * kLog2E;
        rows.diagonal0 = row_position<Tile.packs>(p, w, first_row()) + shift;
        rows.diagonal1 = row_position<Tile.packs>(p, w, first_row() + 8) + shift;
        return rows;
      };
      auto modify = [&](int n) {
        if (Modified && p.modified) modify_scores<Tile>(s, p, alibi_rows(), n * kKeys);
      };
      auto mask = [&](int n) {
        if (n >= part.full_begin && n < part.full_end) return;
        const MaskRule rule(w);
        const int column0 = n * kKeys + 2 * (lane() % 4), row = first_row();
        const int i0 = row_position<Tile.packs>(p, w, row),
                  i1 = row_position<Tile.packs>(p, w, row + 8);
        mask_scores(
            s, bits_before(rule.row_end(i0) - column0) & ~bits_before(rule.row_begin(i0) - column0),
            bits_before(rule.row_end(i1) - column0) & ~bits_before(rule.row_begin(i1) - column0));
      };
      auto end_qk = [&](int n) {
        ptx::hold_registers(s);
        shared.k_ring.release(position(key_tile));
        ++key_tile;
        if constexpr (!Tile.q_registers()) {
          if (n + 1 == end)
            release_q();  // the next tile's Q takes its place while this one's softmax runs
        }
      };
      auto end_pv_step = [&] {
        ptx::wgmma_wait<0>();
        ptx::hold_registers(o);
        shared.v_ring.release(position(key_tile - 2));  // end_qk has counted on
      };
      bool next_full = false;  // K of the next tile, looked for while P is packed
      // The scores of key tile n are in s and P V of tile n - 1 is in flight: softmax, P.
      // `alibi`: not read where scores are not modified, or there is a mask.
      auto frozen_tile = [&](int n, bool masked, auto modified, const AlibiRows& alibi) {
        float t0, t1, f0, f1;
        ScoreForm form;
        if constexpr (modified) {
          form = form_of<Tile>(s, p, state, alibi, n * kKeys);
        } else {
          modify(n);
          if (masked) mask(n);
        }
        auto exponentials = [&](auto begin, auto end) {  // of 16 keys
          if constexpr (modified) {
            exponentials_of<8 * begin, 8 * end>(s, p, state, form, alibi, t0, t1);
          } else {
            softmax_frozen_part<8 * begin, 8 * end>(s, state, scale_log2, t0, t1);
          }
        };
        constexpr std::integral_constant<int, 0> kFirst;
        constexpr std::integral_constant<int, kKeys / 16> kAll;
        if constexpr (Tile.staged) {
          constexpr std::integral_constant<int, kKeys / 16 * 3 / 4> kEarly;
          t0 = t1 = 0.0f;
          exponentials(kFirst, kEarly);
          end_block(p.never);
          end_pv_step();
          exponentials(kEarly, kAll);
          pack_steps(0, kEarly);
          next_full = looks_ahead && shared.k_ring.is_full(position(key_tile));
          state.l0 += t0;
          state.l1 += t1;
          if (__any_sync(0xffffffffu, fmaxf(t0, t1) > kRaiseThreshold<Element>)) {
            raise_rows<Element>(s, state, t0, t1, f0, f1);
            scale_rows(o, f0, f1);
            pack_steps(0, kEarly);
          }
          pack_steps(kEarly, kKeys / 16);
          return;
        }
        t0 = t1 = 0.0f;
        exponentials(kFirst, kAll);
        state.l0 += t0;
        state.l1 += t1;
        const bool raise = __any_sync(0xffffffffu, fmaxf(t0, t1) > kRaiseThreshold<Element>);
        // This branch also keeps ptxas from moving the wait for P V up into the exponentials.
        if (raise) raise_rows<Element>(s, state, t0, t1, f0, f1);
        end_pv_step();
        if (raise) scale_rows(o, f0, f1);
        next_full = looks_ahead && shared.k_ring.is_full(position(key_tile));
        pack_probability();
      };
      auto online_tile = [&](int n) {
        float f0, f1;
        modify(n);
        mask(n);
        softmax_online(s, state, scale_log2, false, uniform(w.mode) == Work::redo,
                       0.5f * float(w.len_k), f0, f1);
        end_pv_step();
        scale_rows(o, f0, f1);
        next_full = looks_ahead && shared.k_ring.is_full(position(key_tile));
        pack_probability();
      };

      // First key tile; chained, over the last P V of the query tile before. (That tile's stores
      // under the second Q K^T instead: no gain beyond the spread.)
      float unused0, unused1;
      int n = begin + 1;
      if (!k_full) shared.k_ring.wait_full(position(key_tile));
      if (Tile.chained() && pending >= 0) wait_last_v(v_full);
      my_turn();
      issue_qk();
      RowEnds ends{};
      if (Tile.chained() && pending >= 0) {
        issue_pv();
        next_turn();
        ends = end_pending();
        ptx::wgmma_wait<1>();
      } else {
        next_turn();
        ptx::wgmma_wait<0>();
      }
      end_qk(begin);
      modify(begin);
      mask(begin);
      if (traits & Work::same_first) {
        first_maximum<32>(s, state, scale_log2);
        float t0, t1;
        softmax_frozen(s, state, scale_log2, t0, t1);
        state.l0 = t0;
        state.l1 = t1;
        const bool raise = __any_sync(0xffffffffu, fmaxf(t0, t1) > kRaiseThreshold<Element>);
        if (raise) raise_rows<Element>(s, state, t0, t1, unused0, unused1);
      } else {
        softmax_online(s, state, scale_log2, true, uniform(w.mode) == Work::redo, 0.0f, unused0,
                       unused1);
      }
      if constexpr (Tile.chained()) {
        ptx::wgmma_wait<0>();
        ptx::hold_registers(o);
        pass_v(2);
      }
      next_full = looks_ahead && shared.k_ring.is_full(position(key_tile));
      pack_probability();
      const int finished = pending;
      pending =
          message + kValid * min(uniform(w.len_k) - (end - 1) * kKeys, kKeys) + kTraits * traits;
      if (Tile.chained() && finished >= 0) store_pending(finished, ends);
      accumulate = 0;

      // One key tile: Q K^T of tile n and P V of tile n - 1 in flight, softmax of n under the
      // latter.
      auto begin_step = [&](int n) {
        if (!next_full) shared.k_ring.wait_full(position(key_tile));
        my_turn();
        issue_qk();
        shared.v_ring.wait_full(position(key_tile - 1));
        issue_pv();
        next_turn();
        ptx::wgmma_wait<1>();
        end_qk(n);
      };
      while (n < end) {
        if (n >= frozen_begin() && n < frozen_end()) {
          const int full_end = min(frozen_end(), uniform(part.full_end));
          if (n >= uniform(part.full_begin)) {
            auto full_tiles = [&](auto modified, auto alibi) {
              for (; n < full_end; ++n) {
                begin_step(n);
                frozen_tile(n, false, modified, alibi());
              }
            };
            if (Modified && !Tile.splits && p.modified) {
              // Loads and 40 instructions: not in the loop, where there are registers.
              const AlibiRows kept = kWideModified ? AlibiRows{} : alibi_rows();
              full_tiles(std::true_type{}, [&] { return kWideModified ? alibi_rows() : kept; });
            } else {
              full_tiles(std::false_type{}, [] { return AlibiRows{}; });
            }
          }
          if (n < frozen_end()) {
            begin_step(n);
            frozen_tile(n, true, std::false_type{}, {});
            ++n;
          }
        } else {
          begin_step(n);
          online_tile(n);
          ++n;
        }
      }
    };

    // Every warpgroup takes as many turns as the block visits key tiles; a flush takes one.
    int passed, turns, then = 0;  // then, of a flush: its answer, or the end
    constexpr int kAnswer = 1, kEnd = 2;
    if (begin < end) {
      compute();
      message = pending & (kMessages - 1);  // not kept meanwhile: no register is left
      passed = uniform(w.end) - end;
      turns = passed + !Tile.chained();
    } else {
      passed = uniform(w.end) - begin;
      if (passed > 0) release_q();  // before the last key tile is waited for
      if (mode < Work::flush)
        write_empty_rows<Tile, Element>(p, w, uniform_group(), lane(), staging(),
                                        &shared.redo[slot]);
      turns = Tile.chained() ? max(passed, 1) : passed > 0 ? passed + 1 : 0;
      then = mode == Work::stop ? kEnd : passed > 0 ? 0 : kAnswer;
    }
#pragma unroll 1
    for (int i = 0; i < turns; ++i) step_alone(i < passed);
    if (then == kEnd) break;
    if (then == kAnswer) release_q();
  }
  // Shared memory must outlive the stores that read it.
  if (lane() == 0) ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{});
}

}  // namespace abacist::cuda::sm90
