#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "text.hpp"

namespace abacist::cli {
namespace {

constexpr double kQuiet = 0.5;     // seconds before the first sign
constexpr double kInterval = 0.1;  // seconds between redraws
constexpr double kLines = 2.0;     // seconds before the first line, and between two
constexpr int kBarWidth = 30;

std::string clock_text(double seconds) {
  return seconds < 100.0 ? fmt::format("{:.0f} s", seconds) : duration_text(seconds);
}

/// fmt::print, but a standard error that cannot be written is no error: progress must not throw.
template <class... Args>
void write_text(fmt::format_string<Args...> format, Args&&... args) {
  std::fputs(fmt::format(format, std::forward<Args>(args)...).c_str(), stderr);
}

}  // namespace

Progress::Mode Progress::mode(bool wanted) {
  if (isatty(STDERR_FILENO) != 0) return Mode::bar;
  return wanted ? Mode::lines : Mode::off;
}

Progress::Progress(Mode mode, std::string label) : mode_(mode), label_(std::move(label)) {}

void Progress::restart(std::string label) {
  finish();
  const std::lock_guard lock(mutex_);
  label_ = std::move(label);
  start_ = drawn_ = Clock::now();
  tenths_ = 0;
}

void Progress::update(double done) {
  if (mode_ == Mode::off || done <= 0.0) return;
  // A worker never waits to report; another report follows.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const auto now = Clock::now();
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const double since = std::chrono::duration<double>(now - drawn_).count();
  if (elapsed < kQuiet || since < (mode_ == Mode::bar ? kInterval : kLines)) return;
  const double left = elapsed * (1.0 - std::min(done, 1.0)) / done;
  std::string times = clock_text(elapsed);
  if (done < 1.0) times += fmt::format(", about {} left", clock_text(left));
  if (mode_ == Mode::bar) {
    drawn_ = now;
    draw_bar(done, times);
  } else if (const int tenths = static_cast<int>(done * 10.0); tenths > tenths_) {
    tenths_ = tenths;
    drawn_ = now;
    write_text("{} {:3.0f}%  {}\n", label_, 100.0 * done, times);
  }
}

void Progress::draw_bar(double done, const std::string& times) {
  const int full = static_cast<int>(std::clamp(done, 0.0, 1.0) * kBarWidth);
  // \033[K clears what a longer line left behind.
  write_text("\r{} [{:#<{}}{:.<{}}] {:3.0f}%  {}\033[K", label_, "", full, "", kBarWidth - full,
             100.0 * done, times);
  std::fflush(stderr);
  visible_ = true;
}

void Progress::finish() {
  const std::lock_guard lock(mutex_);
  if (!visible_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  visible_ = false;
}

}  // namespace abacist::cli
