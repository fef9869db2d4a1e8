// abacist attend: O and LSE of tensors in files.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abacist/attention.hpp"
#include "commands.hpp"
#include "features.hpp"
#include "io/npy.hpp"
#include "io/pending_file.hpp"
#include "io/safetensors.hpp"
#include "io/tensor_file.hpp"
#include "operands.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "runner.hpp"
#include "text.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

struct AttendArguments {
  FileArguments files;
  SizeArguments sizes;
  ScoreArguments score;
  RunArguments run;
  bool random = false;
  bool discard = false;
  bool progress = false;
  std::string out, lse, out_dtype;
};

/// One output file and what goes into it.
struct Destination {
  io::Location location;
  std::vector<const Operand*> operands;
  std::vector<io::Array> arrays;  ///< names, types and shapes
  std::unique_ptr<io::PendingFile> file;
  std::string header;
};

io::Array described(const std::string& name, const Operand& operand) {
  io::Array array;
  array.name = name;
  array.dtype = operand.spec.dtype;
  array.shape = operand.file_shape;
  return array;
}

/// All that a run writes. Files are created, and their space taken, before the run.
class Outputs {
 public:
  void add(const std::string& text, const std::string& name, const Operand& operand) {
    const io::Location at = io::Location::parse(text);
    if (at.format == io::Format::npy && !io::npy_can_hold(operand.spec.dtype)) {
      throw UserError(
          fmt::format("{}: .npy has no bf16; write .safetensors, or --out-type f32", at.path));
    }
    const std::string& chosen = at.name.empty() ? name : at.name;
    for (Destination& other : all_) {
      if (!io::same_file(other.location.path, at.path)) continue;
      if (at.format == io::Format::npy || other.arrays.front().name == chosen) {
        throw UserError(at.path + " is given for two outputs");
      }
      other.operands.push_back(&operand);
      other.arrays.push_back(described(chosen, operand));
      return;
    }
    all_.push_back({at, {&operand}, {described(chosen, operand)}, nullptr, ""});
  }

  void create(const Inputs& inputs) {
    for (Destination& d : all_) inputs.refuse_to_overwrite(d.location.path);
    for (Destination& d : all_) {
      d.header = d.location.format == io::Format::npy
                     ? io::npy_header(*d.arrays[0].dtype, d.arrays[0].shape)
                     : io::safetensors_header(d.arrays);
      auto bytes = static_cast<std::int64_t>(d.header.size());
      for (const Operand* operand : d.operands) bytes += operand->bytes();
      d.file = std::make_unique<io::PendingFile>(d.location.path);
      d.file->reserve(bytes);
    }
  }

  void write() {
    for (Destination& d : all_) {
      d.file->write(d.header.data(), d.header.size());
      for (const Operand* operand : d.operands) {
        d.file->write(operand->data, static_cast<std::size_t>(operand->bytes()));
      }
    }
    for (Destination& d : all_) d.file->commit();
  }

  std::string text() const {
    std::string text;
    for (const Destination& d : all_) {
      for (std::size_t i = 0; i < d.arrays.size(); ++i) {
        text += fmt::format("{}{}: {} {}{}", text.empty() ? "" : "; ", d.location.path,
                            d.arrays[i].name, to_string(*d.arrays[i].dtype),
                            io::shape_text(d.arrays[i].shape));
      }
    }
    return text.empty() ? "nothing (no --out)" : text;
  }

 private:
  std::vector<Destination> all_;
};

Inputs make_inputs(const AttendArguments& a) {
  if (a.random && a.files.given()) throw UserError("give files or --random, not both");
  if (a.discard && !(a.out.empty() && a.lse.empty())) {
    throw UserError("--discard writes nothing, --out and --lse do: give one or the other");
  }
  if (!a.random && a.out.empty() && !a.discard) {
    throw UserError("--out is missing (or --discard, to write nothing)");
  }
  Inputs inputs = a.random ? random_inputs(a.sizes) : load_inputs(a.files);
  add_features(inputs, a.score, a.sizes.seed);
  return inputs;
}

/// The LSE is computed if it goes anywhere: to --lse, or beside O in a .safetensors file.
bool wants_lse(const AttendArguments& a) {
  return !a.lse.empty() ||
         (!a.out.empty() && io::Location::parse(a.out).format == io::Format::safetensors);
}

void print_summary(const Runner& runner, const AttendArguments& a, const Outputs& outputs,
                   const RunTime& time) {
  const PlanInfo& info = runner.info();
  const Operands& x = runner.plan().problem().operands;
  const double flops = static_cast<double>(info.flops.value);
  fmt::print("attention  q {}, k {}, v {}; {}\n", operand_text(x.q), operand_text(x.k),
             operand_text(x.v), a.score.text());
  fmt::print("kernel     {}\n", kernel_text(info));
  fmt::print("scores     {} (query, key) pairs that see each other\n",
             count_text(info.visible_pairs.value));
  const bool on_gpu = runner.place().on_gpu();
  fmt::print("time       {}{}\n", duration_text(time.seconds),
             on_gpu ? fmt::format(" on the GPU; {} of copies there and back",
                                  duration_text(time.copy_seconds))
                    : "");
  fmt::print("speed      {} ({})\n", rate_text(flops / time.seconds), flops_text(flops));
  fmt::print("memory     {} at most, {}; the score matrix would take {} in f32\n",
             bytes_text(static_cast<double>(peak_memory_bytes())),
             on_gpu ? "on the host" : "everything included",
             bytes_text(score_matrix_bytes(runner.plan().problem())));
  fmt::print("wrote      {}\n", outputs.text());
}

void attend(const AttendArguments& a) {
  const Inputs inputs = make_inputs(a);
  const DType o_dtype = a.out_dtype.empty() ? inputs.q.spec.dtype : parse_dtype(a.out_dtype);
  Operand o = make_o(inputs, o_dtype);
  Operand lse = wants_lse(a) ? make_lse(inputs) : Operand{};
  const ForwardTensors tensors = inputs.forward(o.out(), lse.out());
  const Runner runner(make_problem(tensors, options_for(a.score, inputs)), a.run.place());
  Outputs outputs;
  if (!a.out.empty()) outputs.add(a.out, "o", o);
  if (lse.spec.present())
    outputs.add(a.lse.empty() ? io::Location::parse(a.out).path : a.lse, "lse", lse);
  outputs.create(inputs);

  Progress progress(Progress::mode(a.progress), "attend");
  const RunTime time = runner.run(tensors, &progress);
  progress.finish();
  outputs.write();
  print_summary(runner, a, outputs, time);
}

}  // namespace

void add_attend(CLI::App& app) {
  const auto a = std::make_shared<AttendArguments>();
  CLI::App* command = app.add_subcommand("attend", "O and LSE of Q, K and V");
  a->files.add_to(*command);
  CLI::Option* random =
      command->add_flag("--random", a->random, "Random normal Q, K and V of the given sizes")
          ->group("Sizes");
  a->sizes.add_to(*command, random);
  a->score.add_to(*command);
  const std::string group = "Outputs";
  command->add_option("--out,-o", a->out, "O to FILE.npy or FILE.safetensors[:NAME]")->group(group);
  command
      ->add_option(
          "--lse", a->lse,
          "LSE to FILE.npy or FILE.safetensors[:NAME] (default: beside O in a .safetensors "
          "file)")
      ->group(group);
  command->add_option("--out-type", a->out_dtype, "Type of O: that of Q (default), or f32")
      ->group(group);
  command->add_flag("--discard", a->discard, "Write nothing")->group(group);
  command->add_flag("--progress", a->progress, "Progress also when stderr is no terminal")
      ->group(group);
  a->run.add_to(*command);
  command->callback([a] { attend(*a); });
}

}  // namespace abacist::cli
