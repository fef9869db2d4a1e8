// Appending to caches and rotary embedding: checks, then rows in parallel.
#include <algorithm>
#include <string>
#include <vector>

#include "abacist/cache.hpp"
#include "api/caught.hpp"
#include "api/tensors.hpp"
#include "api/validate.hpp"
#include "core/geometry.hpp"
#include "core/numeric.hpp"
#include "core/saturate.hpp"
#include "core/text.hpp"
#include "cpu/driver.hpp"

namespace abacist {
namespace {

using api::invalid;

Status expect_spec(const char* name, const TensorSpec& spec, const TensorSpec& wanted,
                   const char* letters) {
  const bool same =
      spec.rank == wanted.rank && spec.dtype == wanted.dtype &&
      std::equal(spec.shape.begin(), spec.shape.begin() + spec.rank, wanted.shape.begin());
  if (same) return {};
  return invalid(
      name, "is " + core::to_text(spec) + ", must be " + letters + " = " + core::to_text(wanted));
}

Status check_basics(const char* name, const TensorSpec& spec, bool output) {
  if (!spec.present()) return invalid(name, "is absent");
  if (Status s = api::check_view(name, spec, output); !s) return s;
  if (spec.device.type == DeviceType::cpu) return {};
  return Error{ErrorCode::unsupported, name,
               "is on " + core::to_text(spec.device) + "; caches are filled on the host"};
}

Status check_type(const char* name, const TensorSpec& spec) {
  if (spec.dtype == DType::f32 || spec.dtype == DType::bf16 || spec.dtype == DType::f16) return {};
  return invalid(name,
                 std::string("dtype is ") + to_string(spec.dtype) + ", must be f32, bf16 or f16");
}

Status check_integers(const char* name, const TensorSpec& spec, std::int64_t b) {
  if (Status s = check_basics(name, spec, false); !s) return s;
  if (Status s = expect_spec(name, spec, contiguous(DType::i32, {b}), "i32[b]"); !s) return s;
  if (b <= 1 || spec.stride[0] == 1) return {};
  return invalid(name, "has stride " + std::to_string(spec.stride[0]) + ", must be contiguous");
}

std::int32_t integer(const ConstTensor& tensor, std::int64_t index) {
  return static_cast<const std::int32_t*>(tensor.data)[index];
}

/// The tables fit heads of d elements.
Status check_rotary(const Rotary& rotary, std::int64_t d) {
  if (!rotary.present()) return {};
  for (auto [name, table] : {std::pair{"rotary.cos", &rotary.cos}, {"rotary.sin", &rotary.sin}}) {
    if (Status s = check_basics(name, *table, false); !s) return s;
    if (table->rank != 2 || table->dtype != DType::f32 || 2 * table->shape[1] > d) {
      return invalid(name, "is " + core::to_text(*table) +
                               ", must be f32[positions, d_rot / 2] with d_rot at most " +
                               std::to_string(d));
    }
  }
  if (rotary.style > RotaryStyle::half_split) {
    return invalid("rotary.style", "is " + std::to_string(static_cast<int>(rotary.style)) +
                                       ", must be interleaved or half_split");
  }
  return expect_spec("rotary.sin", rotary.sin, rotary.cos, "as rotary.cos");
}

/// Every position from positions[n] to positions[n] + count - 1 is in [0, room).
Status check_positions(const char* name, const ConstTensor& positions, std::int64_t count,
                       std::int64_t room, const char* what) {
  for (std::int64_t n = 0; n < positions.shape[0]; ++n) {
    const std::int64_t first = integer(positions, n);
    if (first >= 0 && first + count <= room) continue;
    return invalid(name, "[" + std::to_string(n) + "] is " + std::to_string(first) + ", with " +
                             std::to_string(count) + " more it must be in [0, " +
                             std::to_string(room - count) + "]: " + what + " " +
                             std::to_string(room));
  }
  return {};
}

/// Turns a head in place.
void rotate_head(const Rotary& rotary, std::int64_t position, float* head) {
  const std::int64_t pairs = rotary.cos.shape[1];
  const bool split = rotary.style == RotaryStyle::half_split;
  for (std::int64_t i = 0; i < pairs; ++i) {
    const auto at = [&](const ConstTensor& table) {
      return static_cast<const float*>(
          table.data)[position * table.stride[0] + i * table.stride[1]];
    };
    float& a = head[split ? i : 2 * i];
    float& b = head[split ? i + pairs : 2 * i + 1];
    const float turned = a * at(rotary.cos) - b * at(rotary.sin);
    b = a * at(rotary.sin) + b * at(rotary.cos);
    a = turned;
  }
}

/// One head of one row, through a row of floats.
void move_head(const ConstTensor& from, std::int64_t from_at, const Tensor& to, std::int64_t to_at,
               const Rotary& rotary, std::int64_t position, std::vector<float>& head) {
  const std::int64_t d = from.shape[3];
  for (std::int64_t e = 0; e < d; ++e) {
    head[static_cast<std::size_t>(e)] =
        static_cast<float>(core::load_element(from.data, from.dtype, from_at + e * from.stride[3]));
  }
  if (rotary.present()) rotate_head(rotary, position, head.data());
  for (std::int64_t e = 0; e < d; ++e) {
    core::store_element(to.data, to.dtype, to_at + e * to.stride[3],
                        double{head[static_cast<std::size_t>(e)]});
  }
}

/// Rows [first, last) of a page, which take new keys by entry [n, entry] of the block table.
struct Filling {
  std::int64_t page, first, last, n, entry;

  /// In this order neighbours overlap if any two do.
  bool operator<(const Filling& other) const {
    if (page != other.page) return page < other.page;
    if (first != other.first) return first < other.first;
    return n != other.n ? n < other.n : entry < other.entry;
  }
};

std::string entry_text(std::int64_t n, std::int64_t entry) {
  return "[" + std::to_string(n) + ", " + std::to_string(entry) + "]";
}

class Append {
 public:
  Append(const AppendTensors& t, const Rotary& rotary) : t_(t), rotary_(rotary) {}

  Status check() {
    const std::pair<const char*, const TensorSpec*> all[] = {
        {"k", &t_.k}, {"v", &t_.v}, {"k_cache", &t_.k_cache}, {"v_cache", &t_.v_cache}};
    for (const auto& [name, spec] : all) {
      const bool output = spec == &t_.k_cache || spec == &t_.v_cache;
      if (Status s = check_basics(name, *spec, output); !s) return s;
      if (spec->rank != kMaxRank) {
        return invalid(name, "rank is " + std::to_string(spec->rank) + ", must be 4");
      }
      if (Status s = check_type(name, *spec); !s) return s;
    }
    const Extents& k = t_.k.shape;
    const Extents& cache = t_.k_cache.shape;
    const DType type = t_.k.dtype;
    const bool paged = t_.block_table.present();
    const TensorSpec v = contiguous(type, {k[0], k[1], k[2], t_.v.shape[3]});
    if (Status s = expect_spec("v", t_.v, v, "[b, s_new, h_k, d_v]"); !s) return s;
    const char* letters = paged ? "[pages, page_size, h_k, d]" : "[b, s_k, h_k, d]";
    const std::int64_t first = paged ? cache[0] : k[0];
    const TensorSpec k_wanted = contiguous(type, {first, cache[1], k[2], k[3]});
    if (Status s = expect_spec("k_cache", t_.k_cache, k_wanted, letters); !s) return s;
    const TensorSpec v_wanted = contiguous(type, {first, cache[1], k[2], t_.v.shape[3]});
    if (Status s = expect_spec("v_cache", t_.v_cache, v_wanted, letters); !s) return s;
    if (Status s = check_integers("lengths", t_.lengths, k[0]); !s) return s;
    if (Status s = check_rotary(rotary_, k[3]); !s) return s;
    if (paged) {
      if (Status s = check_table(); !s) return s;
    }
    const api::NamedTensor operands[] = {{"k", t_.k},
                                         {"v", t_.v},
                                         {"k_cache", t_.k_cache, true},
                                         {"v_cache", t_.v_cache, true},
                                         {"lengths", t_.lengths},
                                         {"block_table", t_.block_table},
                                         {"rotary.cos", rotary_.cos},
                                         {"rotary.sin", rotary_.sin}};
    if (Status s = api::check_operands(operands); !s) return s;
    return check_values();
  }

  void run() const {
    const std::int64_t b = t_.k.shape[0];
    const std::int64_t rows = t_.k.shape[1];
    const std::int64_t widest = std::max(t_.k.shape[3], t_.v.shape[3]);
    cpu::for_each_ticket(b * rows, cpu::default_threads(), [&](std::int64_t ticket, int) {
      std::vector<float> head(static_cast<std::size_t>(widest));
      const std::int64_t n = ticket / rows;
      const std::int64_t row = ticket % rows;
      const std::int64_t key = integer(t_.lengths, n) + row;
      const auto [entry, slot] = place(n, key);
      for (std::int64_t h = 0; h < t_.k.shape[2]; ++h) {
        const auto at = [h](const TensorSpec& x, std::int64_t i, std::int64_t j) {
          return i * x.stride[0] + j * x.stride[1] + h * x.stride[2];
        };
        move_head(t_.k, at(t_.k, n, row), t_.k_cache, at(t_.k_cache, entry, slot), rotary_, key,
                  head);
        move_head(t_.v, at(t_.v, n, row), t_.v_cache, at(t_.v_cache, entry, slot), {}, 0, head);
      }
    });
  }

 private:
  Status check_table() const {
    const TensorSpec& table = t_.block_table;
    if (Status s = check_basics("block_table", table, false); !s) return s;
    if (t_.k_cache.shape[1] < 1) {
      return invalid("k_cache", "page_size is 0, must be at least 1");
    }
    if (table.rank == 2 && table.dtype == DType::i32 && table.shape[0] == t_.k.shape[0] &&
        (table.shape[1] <= 1 || table.stride[1] == 1)) {
      return {};
    }
    return invalid("block_table", "is " + core::to_text(table) +
                                      ", must be i32[b, max_pages] with contiguous rows");
  }

  /// What lies in lengths and table.
  Status check_values() const {
    const std::int64_t count = t_.k.shape[1];
    const bool paged = t_.block_table.present();
    const std::int64_t room =
        paged ? (core::Count{t_.block_table.shape[1]} * t_.k_cache.shape[1]).value
              : t_.k_cache.shape[1];
    if (Status s = check_positions("lengths", t_.lengths, count, room, "the cache has room for");
        !s) {
      return s;
    }
    if (rotary_.present()) {
      if (Status s = check_positions("lengths", t_.lengths, count, rotary_.cos.shape[0],
                                     "rotary.cos has positions up to");
          !s) {
        return s;
      }
    }
    return paged && count > 0 ? check_pages(count) : Status{};
  }

  /// The pages that take new keys are there, and no row of one takes two.
  Status check_pages(std::int64_t count) const {
    const std::int64_t size = t_.k_cache.shape[1];
    std::vector<Filling> fillings;
    for (std::int64_t n = 0; n < t_.k.shape[0]; ++n) {
      const std::int64_t first = integer(t_.lengths, n);
      for (std::int64_t entry = first / size; entry * size < first + count; ++entry) {
        const std::int64_t page = page_id(n, entry);
        if (page < 0 || page >= t_.k_cache.shape[0]) {
          return invalid("block_table", entry_text(n, entry) + " is " + std::to_string(page) +
                                            ", must be in [0, pages = " +
                                            std::to_string(t_.k_cache.shape[0]) + ")");
        }
        const std::int64_t start = entry * size;
        fillings.push_back({page, std::max(first - start, std::int64_t{0}),
                            std::min(first + count - start, size), n, entry});
      }
    }
    std::sort(fillings.begin(), fillings.end());
    for (std::size_t i = 1; i < fillings.size(); ++i) {
      const Filling& a = fillings[i - 1];
      const Filling& b = fillings[i];
      if (a.page != b.page || b.first >= a.last) continue;
      return invalid("block_table", entry_text(a.n, a.entry) + " and " + entry_text(b.n, b.entry) +
                                        " are both " + std::to_string(a.page) +
                                        ", must differ: new keys of both would go to row " +
                                        std::to_string(b.first) + " of that page");
    }
    return {};
  }

  std::int64_t page_id(std::int64_t n, std::int64_t page) const {
    return integer(t_.block_table, n * t_.block_table.stride[0] + page);
  }

  /// First two indices of key `key` of sequence n in the cache.
  std::pair<std::int64_t, std::int64_t> place(std::int64_t n, std::int64_t key) const {
    if (!t_.block_table.present()) return {n, key};
    const std::int64_t size = t_.k_cache.shape[1];
    return {page_id(n, key / size), key % size};
  }

  const AppendTensors& t_;
  const Rotary& rotary_;
};

Status check_rotation(const ConstTensor& x, const ConstTensor& positions, const Rotary& rotary,
                      const Tensor& out) {
  if (Status s = check_basics("x", x, false); !s) return s;
  if (x.rank != kMaxRank) return invalid("x", "rank is " + std::to_string(x.rank) + ", must be 4");
  if (Status s = check_type("x", x); !s) return s;
  if (Status s = check_basics("out", out, true); !s) return s;
  if (Status s = expect_spec("out", out, x, "as x"); !s) return s;
  if (Status s = check_integers("positions", positions, x.shape[0]); !s) return s;
  if (!rotary.present()) return invalid("rotary.cos", "is absent");
  if (Status s = check_rotary(rotary, x.shape[3]); !s) return s;
  const bool in_place = out.data == x.data && out.spec() == x.spec();
  const api::NamedTensor operands[] = {{"x", in_place ? ConstTensor{} : x},
                                       {"out", out, true},
                                       {"positions", positions},
                                       {"rotary.cos", rotary.cos},
                                       {"rotary.sin", rotary.sin}};
  if (Status s = api::check_operands(operands); !s) return s;
  return check_positions("positions", positions, x.shape[1], rotary.cos.shape[0],
                         "rotary.cos has positions up to");
}

}  // namespace

Status append(const AppendTensors& tensors, const Rotary& rotary) try {
  Append work(tensors, rotary);
  if (Status s = work.check(); !s) return s;
  work.run();
  return {};
} catch (...) {
  return api::caught();
}

Status rotate(const ConstTensor& x, const ConstTensor& positions, const Rotary& rotary,
              const Tensor& out) try {
  if (Status s = check_rotation(x, positions, rotary, out); !s) return s;
  const std::int64_t rows = x.shape[1];
  cpu::for_each_ticket(x.shape[0] * rows, cpu::default_threads(), [&](std::int64_t ticket, int) {
    std::vector<float> head(static_cast<std::size_t>(x.shape[3]));
    const std::int64_t n = ticket / rows;
    const std::int64_t row = ticket % rows;
    for (std::int64_t h = 0; h < x.shape[2]; ++h) {
      const auto at = [&](const TensorSpec& spec) {
        return n * spec.stride[0] + row * spec.stride[1] + h * spec.stride[2];
      };
      move_head(x, at(x), out, at(out), rotary, integer(positions, n) + row, head);
    }
  });
  return {};
} catch (...) {
  return api::caught();
}

}  // namespace abacist
