// A small writer of SVG: shapes with classes, whose colours a style sheet gives, light or dark.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace abacist::cli {

/// &, < and > as entities; bytes that XML forbids as "?".
std::string escaped(std::string_view text);

class Svg {
 public:
  enum class Anchor { start, middle, end };

  void rect(const char* type, double x, double y, double width, double height,
            std::string_view title = {});
  void line(const char* type, double x1, double y1, double x2, double y2);
  void circle(const char* type, double x, double y, double radius, std::string_view title = {});
  void polyline(const char* type, const std::string& points);
  void triangle(const char* type, double x, double y, double size, std::string_view title = {});
  void text(const char* type, double x, double y, std::string_view text,
            Anchor anchor = Anchor::start);

  /// The whole document, `label` being what a screen reader says.
  std::string document(double width, double height, std::string_view label) const;

 private:
  void close(const char* element, std::string_view title);

  std::string body_;
};

}  // namespace abacist::cli
