#include "picture/svg.hpp"

namespace abacist::cli {
namespace {

// Colours: blue runs, amber runs under a mask (hatched, too, for eyes that see no colours), grey is
// skipped. The dark half keeps the contrasts of the light one.
constexpr std::string_view kStyle = R"(
:root { color-scheme: light dark; }
svg { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --rule: #d1d9e0; --full: #2f6fde;
  --masked: #e8a317; --stripe: #8a5a00; --skipped: #eceff2; --score: #8aa4c8; --walk: #c4314b; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --rule: #3d444d; --full: #4c8dff;
    --masked: #d9a028; --stripe: #5e3d00; --skipped: #1c222b; --score: #5b7399; --walk: #ff7b8a; }
}
.paper { fill: var(--paper); }
text { font-family: system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif;
  font-size: 13px; fill: var(--ink); }
.title { font-size: 20px; font-weight: 600; }
.head { font-size: 14px; font-weight: 600; }
.soft { fill: var(--soft); }
.small { font-size: 11px; fill: var(--soft); }
.full { fill: var(--full); }
.masked { fill: url(#hatch); }
.skipped { fill: var(--skipped); }
.other { fill: var(--score); }
.rule { stroke: var(--rule); stroke-width: 1; fill: none; }
.cut { stroke: var(--paper); stroke-width: 1; }
.range { fill: var(--score); opacity: 0.55; }
.dot { fill: var(--score); }
.walk { stroke: var(--walk); stroke-width: 2; fill: none; }
.mark { fill: var(--walk); }
.hatch-ground { fill: var(--masked); }
.hatch-stripe { stroke: var(--stripe); stroke-width: 1.2; }
)";

constexpr std::string_view kHatch =
    R"svg(<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect class="hatch-ground" width="6" height="6"/><line class="hatch-stripe" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>)svg";

}  // namespace

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      default:
        result += static_cast<unsigned char>(c) < 0x20 && c != '\n' ? '?' : c;
    }
  }
  return result;
}

void Svg::close(const char* element, std::string_view title) {
  if (title.empty()) {
    body_ += "/>\n";
  } else {
    body_ += fmt::format("><title>{}</title></{}>\n", escaped(title), element);
  }
}

void Svg::rect(const char* type, double x, double y, double width, double height,
               std::string_view title) {
  body_ += fmt::format(R"(<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}")",
                       type, x, y, width, height);
  close("rect", title);
}

void Svg::line(const char* type, double x1, double y1, double x2, double y2) {
  body_ += fmt::format(R"(<line class="{}" x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}"/>)"
                       "\n",
                       type, x1, y1, x2, y2);
}

void Svg::circle(const char* type, double x, double y, double radius, std::string_view title) {
  body_ +=
      fmt::format(R"(<circle class="{}" cx="{:.2f}" cy="{:.2f}" r="{:.2f}")", type, x, y, radius);
  close("circle", title);
}

void Svg::polyline(const char* type, const std::string& points) {
  body_ += fmt::format(R"(<polyline class="{}" points="{}"/>)"
                       "\n",
                       type, points);
}

void Svg::triangle(const char* type, double x, double y, double size, std::string_view title) {
  body_ += fmt::format(R"(<path class="{}" d="M{:.2f} {:.2f}l{:.2f} {:.2f}h{:.2f}z")", type, x, y,
                       -size / 2, -size, size);
  close("path", title);
}

void Svg::text(const char* type, double x, double y, std::string_view text, Anchor anchor) {
  constexpr const char* kAnchors[] = {"start", "middle", "end"};
  body_ += fmt::format(R"(<text class="{}" x="{:.2f}" y="{:.2f}" text-anchor="{}">{}</text>)"
                       "\n",
                       type, x, y, kAnchors[static_cast<int>(anchor)], escaped(text));
}

std::string Svg::document(double width, double height, std::string_view label) const {
  return fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" viewBox="0 0 {0:.0f} {1:.0f}" role="img" aria-label="{2}">)"
      "\n<style>{3}</style>\n{4}\n"
      R"(<rect class="paper" width="100%" height="100%"/>)"
      "\n{5}</svg>\n",
      width, height, escaped(label), kStyle, kHatch, body_);
}

}  // namespace abacist::cli
