// A progress bar on stderr.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace abacist::cli {

/// Shows the share done and the time left. On a terminal a bar that is redrawn; elsewhere, if asked
/// for, a line at some tenths. Work that is soon done shows nothing.
class Progress {
 public:
  enum class Mode { off, lines, bar };

  /// `bar` on a terminal; elsewhere `lines` if wanted, else `off`.
  static Mode mode(bool wanted);

  Progress(Mode mode, std::string label);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Another piece of work begins.
  void restart(std::string label);
  /// May be called from any thread.
  void update(double done);
  /// Removes the bar.
  void finish();

  /// For RunOptions::progress.
  static void callback(double done, void* self) { static_cast<Progress*>(self)->update(done); }

 private:
  using Clock = std::chrono::steady_clock;

  void draw_bar(double done, const std::string& times);

  Mode mode_;
  std::string label_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = start_;
  std::mutex mutex_;
  int tenths_ = 0;
  bool visible_ = false;
};

}  // namespace abacist::cli
