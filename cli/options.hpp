// Command line options that several commands share.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "abacist/plan.hpp"
#include "abacist/problem.hpp"

namespace abacist::cli {

/// Where and how a command runs.
struct Place {
  PlanOptions plan{};
  Device device{};

  bool on_gpu() const { return device.type == DeviceType::cuda; }
};

/// "cpu", "cuda" (the first GPU) or "cuda:N"; throws UserError for anything else.
Device parse_device(const std::string& text);

/// Mask and score.
struct ScoreArguments {
  bool causal = false;
  std::string align = "bottom-right";
  std::string window{};  ///< "L,R"; "" is none
  std::optional<double> scale{};
  double softcap = 0.0;
  std::string alibi{};  ///< "auto" or a file; "" is none
  /// "random" or a file; "" is none. Bias and mask may be "random:AXES", too.
  std::string sinks{}, bias{}, visible{};
  std::string key_lengths{};  ///< "N,N,...", "random" or a file; "" is none
  /// "0,N,N,..." or a file; "" is none, else Q (K and V) hold all sequences behind one another
  std::string cu_seqlens_q{}, cu_seqlens_k{};
  std::string block_table{};  ///< a file; "" is none
  static constexpr std::int64_t kMaxPageSize = std::int64_t{1} << 30;
  std::int64_t page_size = 0;  ///< K and V are put into pages of so many rows; 0: no pages made
  double dropout = 0.0;
  std::uint64_t dropout_seed = 0;

  void add_to(CLI::App& command);
  /// All but what depends on data: see options_for() in features.hpp.
  Options options() const;
  bool varlen() const { return !cu_seqlens_q.empty() || !cu_seqlens_k.empty(); }
  bool paged() const { return page_size > 0 || !block_table.empty(); }
  /// "causal, window 128,0, softcap 30" or "no mask".
  std::string text() const;

 private:
  void add_lengths_to(CLI::App& command);
};

inline constexpr int kMaxThreads = 4096;

/// Where and how to run.
struct RunArguments {
  std::string backend = "automatic";
  std::string device;  ///< "cpu", "cuda" or "cuda:N"; "": as the backend wants it
  int threads = 0;
  bool batch_invariant = false;

  void add_to(CLI::App& command);
  Place place() const;
};

/// Sizes of a problem made up on the spot.
struct SizeArguments {
  std::int64_t b = 1;
  std::int64_t s_q = 1024, s_k = -1;  ///< -1: as s_q
  std::int64_t h_q = 1, h_k = -1;     ///< -1: as h_q
  std::int64_t d_qk = 64, d_v = -1;   ///< -1: as d_qk
  std::string dtype = "f32";
  std::uint64_t seed = 0;

  /// Adds the options; each needs `enabling`, if that is given.
  void add_to(CLI::App& command, CLI::Option* enabling = nullptr);
  /// Defaults that depend on other sizes filled in; each size checked to be sane.
  SizeArguments resolved() const;
};

/// Q, K and V in files.
struct FileArguments {
  std::string all;  ///< a .safetensors file with q, k and v
  std::string q, k, v;
  std::string layout = "bshd";
  std::string dtype;  ///< convert to it first; "" keeps the files' own

  void add_to(CLI::App& command);
  bool given() const { return !all.empty() || !q.empty() || !k.empty() || !v.empty(); }
};

/// "f32", "bf16", "f16", "f64"; throws UserError for anything else.
DType parse_dtype(const std::string& text);

/// "forward" or "backward"; throws UserError for anything else.
Pass parse_pass(const std::string& text);

}  // namespace abacist::cli
