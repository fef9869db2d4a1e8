// abacist info: what this build is and what the machine offers it.
#include <fmt/format.h>

#include <cstdlib>
#include <thread>

#include "abacist/version.hpp"
#include "commands.hpp"
#include "cpu/parallel.hpp"
#include "gpu.hpp"

namespace abacist::cli {
namespace {

void print_info() {
  fmt::print("abacist     {}\n", version());
  fmt::print("build       {}, {}, threads by {}\n", ABACIST_BUILD_TYPE, ABACIST_COMPILER,
             ABACIST_THREADING);
  fmt::print("CPU targets {} (best first)\n", cpu_targets());
  fmt::print("threads     {} by default, {} processors\n", cpu::default_threads(),
             std::thread::hardware_concurrency());
  for (const std::string& gpu : gpu_lines()) fmt::print("GPU         {}\n", gpu);
  for (const char* variable : {"ABACIST_BACKEND", "ABACIST_CPU_TARGET"}) {
    const char* value = std::getenv(variable);
    if (value != nullptr && *value != '\0') fmt::print("{} = {}\n", variable, value);
  }
}

}  // namespace

void add_info(CLI::App& app) {
  app.add_subcommand("info", "Version, instruction sets, threads, GPUs, build")
      ->callback(&print_info);
}

}  // namespace abacist::cli
