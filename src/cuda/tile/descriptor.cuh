// Shared-memory tiles as TMA writes them with 128-byte swizzle, and as wgmma reads them.
//
// A tile [rows, columns] of 16-bit elements is cut into panels of 64 columns = 128 bytes; panel p
// is [rows, 64] at byte p * rows * 128, its 16-byte chunk c of row r at chunk c ^ (r % 8). rows % 8
// == 0 and panels start at multiples of 1,024 bytes, so that the swizzle depends on the address
// alone.
#pragma once
#include <cstdint>

namespace abacist::cuda::tile {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

// wgmma matrix descriptor, 128-byte swizzle. The stride between groups of 8 rows is always 1,024
// bytes; panel_stride_bytes is used by MN-major operands that span several panels (V) and ignored
// otherwise. Only the low word depends on the address, and a byte offset within the tile simply
// adds to it: one uniform addition per wgmma instead of five operations.
struct Descriptor {
  uint32_t low;
  __device__ __forceinline__ explicit Descriptor(uint32_t address, uint32_t panel_stride_bytes = 16)
      : low(address >> 4 | panel_stride_bytes >> 4 << 16) {}
  __device__ __forceinline__ uint64_t at(uint32_t offset_bytes) const {
    constexpr uint32_t kHigh = 1024 >> 4 | 1u << 30;
    return uint64_t(kHigh) << 32 | (low + (offset_bytes >> 4));
  }
};

// K-major operand (Q, K): byte offset of columns [16 step, 16 step + 16).
__device__ __forceinline__ constexpr uint32_t k_major_step_bytes(int step, int rows) {
  return (step % 4) * 32 + (step / 4) * rows * kPanelRowBytes;
}

// MN-major operand (V as [keys, d_v]): byte offset of keys [16 step, 16 step + 16).
__device__ __forceinline__ constexpr uint32_t mn_major_step_bytes(int step) {
  return step * 16 * kPanelRowBytes;
}

}  // namespace abacist::cuda::tile
