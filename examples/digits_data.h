// Handwritten digits without a download: the program draws them itself.
//
// A digit is a few strokes through points that a shaky hand moves a little. The drawing is turned,
// slanted, scaled and shifted, written with a pen of some width, scratched and covered with noise.
// Image i depends on the seed and on i alone.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "dice.h"

namespace examples {

struct DigitSet {
  torch::Tensor images;  // [n, 1, 28, 28], from 0 to 1
  torch::Tensor labels;  // [n], int64
};

namespace digits {

constexpr std::int64_t kSide = 28, kPixels = kSide * kSide;

struct Point {
  double x, y;
};
inline Point between(Point a, Point b, double t) {
  return {a.x + t * (b.x - a.x), a.y + t * (b.y - a.y)};
}
using Stroke = std::vector<Point>;

/// How each digit is written, in a unit square with y pointing down. A point given twice is a
/// corner; elsewhere the pen goes round.
inline const std::array<std::vector<Stroke>, 10>& strokes() {
  // clang-format off
  static const std::array<std::vector<Stroke>, 10> table = {{
      /* 0 */ {{{.5, 0}, {.15, .1}, {.1, .5}, {.15, .9}, {.5, 1}, {.85, .9}, {.9, .5}, {.85, .1},
                {.5, 0}}},
      /* 1 */ {{{.3, .22}, {.55, 0}, {.55, 0}, {.55, 1}}},
      /* 2 */ {{{.15, .25}, {.25, 0}, {.8, 0}, {.85, .35}, {.5, .65}, {.1, 1}, {.1, 1}, {.9, 1}}},
      /* 3 */ {{{.15, .1}, {.5, -.03}, {.9, .1}, {.8, .42}, {.4, .48}, {.4, .48}, {.85, .52},
                {.92, .9}, {.5, 1.05}, {.1, .88}}},
      /* 4 */ {{{.5, 0}, {.1, .65}, {.1, .65}, {.95, .65}}, {{.68, .35}, {.66, 1}}},
      /* 5 */ {{{.85, 0}, {.25, 0}, {.25, 0}, {.2, .45}, {.2, .45}, {.6, .33}, {.95, .6},
                {.8, .98}, {.4, 1.05}, {.1, .88}}},
      /* 6 */ {{{.75, .02}, {.35, .2}, {.1, .6}, {.15, .95}, {.5, 1.05}, {.88, .92}, {.85, .58},
                {.5, .48}, {.2, .6}, {.13, .75}}},
      /* 7 */ {{{.1, 0}, {.9, 0}, {.9, 0}, {.6, .4}, {.4, 1}}},
      /* 8 */ {{{.5, .48}, {.15, .35}, {.18, 0}, {.5, -.03}, {.82, 0}, {.85, .35}, {.5, .48},
                {.1, .62}, {.1, 1}, {.5, 1.04}, {.9, 1}, {.9, .62}, {.5, .48}}},
      /* 9 */ {{{.87, .25}, {.8, .4}, {.5, .52}, {.15, .42}, {.12, .08}, {.5, -.05}, {.85, .05},
                {.9, .4}, {.65, .8}, {.3, 1}}},
  }};
  // clang-format on
  return table;
}

/// Cuts the corners of a stroke (Chaikin's curve); the ends stay.
inline Stroke rounded(const Stroke& stroke) {
  Stroke out = {stroke.front()};
  for (std::size_t i = 0; i + 1 < stroke.size(); ++i) {
    out.push_back(between(stroke[i], stroke[i + 1], 0.25));
    out.push_back(between(stroke[i], stroke[i + 1], 0.75));
  }
  out.push_back(stroke.back());
  return out;
}

/// From the unit square to pixels: turned, slanted, scaled, shifted.
class Placement {
 public:
  explicit Placement(Dice& dice) {
    // The tangent of half the angle gives sine and cosine without a library's last bits.
    const double t = dice.uniform(-0.17, 0.17);  // about 19 degrees each way
    const double cosine = (1 - t * t) / (1 + t * t), sine = 2 * t / (1 + t * t);
    const double slant = dice.uniform(-0.3, 0.3);
    const double width = dice.uniform(8, 14), height = dice.uniform(13, 20);
    xx_ = cosine * width, xy_ = (slant * cosine - sine) * height;
    yx_ = sine * width, yy_ = (slant * sine + cosine) * height;
    centre_ = {kSide / 2.0 + dice.uniform(-3, 3), kSide / 2.0 + dice.uniform(-3, 3)};
  }
  Point operator()(Point p) const {
    const double x = p.x - 0.5, y = p.y - 0.5;
    return {centre_.x + xx_ * x + xy_ * y, centre_.y + yx_ * x + yy_ * y};
  }

 private:
  double xx_, xy_, yx_, yy_;
  Point centre_;
};

/// One image: the ink of each pixel, from 0 to 1.
class Canvas {
 public:
  /// Inks every pixel that is nearer to the line from `a` to `b` than half the pen's width.
  void line(Point a, Point b, double pen, double ink = 1) {
    const double reach = pen / 2 + 1;
    const auto first = [&](double low) { return std::max<std::int64_t>(0, floor_of(low - reach)); };
    const auto last = [&](double high) { return std::min(kSide - 1, floor_of(high + reach)); };
    const Point along = {b.x - a.x, b.y - a.y};
    const double length2 = along.x * along.x + along.y * along.y + 1e-12;
    for (auto y = first(std::min(a.y, b.y)); y <= last(std::max(a.y, b.y)); ++y) {
      for (auto x = first(std::min(a.x, b.x)); x <= last(std::max(a.x, b.x)); ++x) {
        const Point from_a = {x + 0.5 - a.x, y + 0.5 - a.y};
        const double t = (from_a.x * along.x + from_a.y * along.y) / length2;
        const Point nearest = between({0, 0}, along, std::clamp(t, 0.0, 1.0));
        const double dx = from_a.x - nearest.x, dy = from_a.y - nearest.y;
        const double cover = std::clamp(pen / 2 + 0.5 - std::sqrt(dx * dx + dy * dy), 0.0, 1.0);
        auto& pixel = pixels_[y * kSide + x];
        pixel = std::max(pixel, ink * cover);
      }
    }
  }

  void noise(Dice& dice, double strength) {
    for (auto& pixel : pixels_) {
      // Three even numbers make a hill that is round enough.
      const double hill = dice.uniform(-1, 1) + dice.uniform(-1, 1) + dice.uniform(-1, 1);
      pixel += strength * hill;
    }
  }

  /// Whole 255ths, so that no last bit of the arithmetic above is seen.
  void write(float* out) const {
    for (std::size_t i = 0; i < pixels_.size(); ++i) {
      out[i] = static_cast<float>(std::floor(std::clamp(pixels_[i], 0.0, 1.0) * 255 + 0.5)) / 255;
    }
  }

 private:
  static std::int64_t floor_of(double x) { return static_cast<std::int64_t>(std::floor(x)); }
  std::array<double, kPixels> pixels_ = {};
};

inline void draw(std::int64_t digit, Dice& dice, float* out) {
  const Placement place(dice);
  const double pen = dice.uniform(1.4, 3.2), ink = dice.uniform(0.5, 1);
  Canvas canvas;
  for (Stroke stroke : strokes()[static_cast<std::size_t>(digit)]) {
    for (auto& point : stroke) {
      point = {point.x + dice.uniform(-0.07, 0.07), point.y + dice.uniform(-0.07, 0.07)};
    }
    stroke = rounded(rounded(stroke));
    for (std::size_t i = 0; i + 1 < stroke.size(); ++i) {
      canvas.line(place(stroke[i]), place(stroke[i + 1]), pen, ink);
    }
  }
  const Point scratch = {dice.uniform(0, kSide), dice.uniform(0, kSide)};
  const Point end = {scratch.x + dice.uniform(-8, 8), scratch.y + dice.uniform(-8, 8)};
  canvas.line(scratch, end, 1, 0.6);
  canvas.noise(dice, dice.uniform(0.02, 0.12));
  canvas.write(out);
}

}  // namespace digits

/// Draws `count` digits, each of the ten as likely as the others.
inline DigitSet draw_digits(std::int64_t count, std::uint64_t seed) {
  DigitSet set = {torch::empty({count, 1, digits::kSide, digits::kSide}),
                  torch::empty({count}, torch::kInt64)};
  for (std::int64_t i = 0; i < count; ++i) {
    Dice dice(seed, static_cast<std::uint64_t>(i));
    const auto digit = dice.below(10);
    set.labels.data_ptr<std::int64_t>()[i] = digit;
    digits::draw(digit, dice, set.images[i].data_ptr<float>());
  }
  return set;
}

}  // namespace examples
