// The commands. Each adds itself to the application; its callback does the work, throws UserError
// or io::FileError for what the user can put right, and sets the exit code for a result that is bad
// news.
#pragma once

#include <CLI/CLI.hpp>

namespace abacist::cli {

void add_attend(CLI::App& app);
void add_verify(CLI::App& app, int& exit_code);
void add_bench(CLI::App& app);
void add_explain(CLI::App& app);
void add_info(CLI::App& app);

}  // namespace abacist::cli
