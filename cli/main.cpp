// abacist: exact attention from the command line.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "abacist/version.hpp"
#include "commands.hpp"
#include "io/pending_file.hpp"
#include "user_error.hpp"

namespace {

/// One line, whatever a file or an argument put into the message.
int report(std::string message) {
  for (char& c : message) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  // Not fmt::print, which throws where standard error cannot be written.
  std::fputs(("abacist: error: " + message + "\n").c_str(), stderr);
  return abacist::cli::kBadInput;
}

/// A standard stream that is closed becomes one that fails: an output file would get its number.
void occupy_standard_streams() {
  int file = 0;
  do {
    file = open("/dev/null", O_RDONLY);
  } while (file >= 0 && file <= STDERR_FILENO);
  if (file > STDERR_FILENO) close(file);
}

/// What is wrong with the first argument if it should be a command and is none; else "".
std::string unknown_command(const CLI::App& app, int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "-";
  if (first.starts_with('-')) return "";
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == first) return "";
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  return "there is no command \"" + first + "\"; there are " + names;
}

int run(int argc, char** argv) {
  CLI::App app{"Exact attention that never writes the score matrix.", "abacist"};
  app.set_version_flag("--version", std::string("abacist ") + abacist::version());
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Help of all commands");
  int exit_code = 0;
  abacist::cli::add_attend(app);
  abacist::cli::add_verify(app, exit_code);
  abacist::cli::add_bench(app);
  abacist::cli::add_explain(app);
  abacist::cli::add_info(app);
  if (const std::string unknown = unknown_command(app, argc, argv); !unknown.empty()) {
    return report(unknown);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return report(std::string(error.what()) + " (see abacist --help)");
  }
  return std::fflush(stdout) == 0 ? exit_code : report("cannot write to standard output");
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_streams();
  abacist::io::unlink_pending_on_signals();
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    return report("out of memory");
  } catch (const std::exception& error) {
    return report(error.what());
  }
}
