// The rule by which the rows of one coordinate set give the rows of another, their targets:
//
//   target = floor(row / divide) * multiply + step       for every step of the row's class
//
// Cells divide; their only step is zero. A generative kernel multiplies; its steps are all offsets. A strided kernel
// divides; a row with residue r = row mod stride reaches only through the offsets congruent to r, by steps of
// (r - offset) / stride. The rows of one residue are a class, and its steps are all that they need.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "box.h"

namespace lattice {

using Wide = std::array<int64_t, most_columns>;

struct TargetRule {
  int columns;
  std::array<int32_t, most_columns> divide, multiply;
  std::vector<Wide> steps;         // class by class
  std::vector<Wide> residues;      // of each class, ascending; a single one where all rows are one class
  std::vector<int32_t> first;      // the first step of each class
  std::vector<int32_t> by_number;  // the class of each residue by its number, or -1; empty where strides are large

  static TargetRule cells(int columns, const std::vector<int>& stride) {
    TargetRule rule(columns);
    std::copy(stride.begin(), stride.end(), rule.divide.begin() + 1);
    rule.steps = {Wide{}};
    rule.residues = {Wide{}};
    rule.first = {0, 1};
    return rule;
  }

  static TargetRule expansion(int columns, const std::vector<std::vector<int>>& offsets,
                              const std::vector<int>& stride) {
    TargetRule rule(columns);
    std::copy(stride.begin(), stride.end(), rule.multiply.begin() + 1);
    for (auto& offset : offsets) std::copy(offset.begin(), offset.end(), rule.steps.emplace_back().begin() + 1);
    rule.residues = {Wide{}};
    rule.first = {0, int32_t(offsets.size())};
    return rule;
  }

  static TargetRule reach(int columns, const std::vector<std::vector<int>>& offsets, const std::vector<int>& stride) {
    TargetRule rule(columns);
    std::copy(stride.begin(), stride.end(), rule.divide.begin() + 1);
    std::vector<std::pair<Wide, Wide>> all;  // residue, step
    for (auto& offset : offsets) {
      auto& [residue, step] = all.emplace_back();
      for (int j = 1; j < columns; ++j) {
        int64_t v = offset[j - 1], by = stride[j - 1];
        residue[j] = (v % by + by) % by;
        step[j] = (residue[j] - v) / by;
      }
    }
    std::sort(all.begin(), all.end());
    for (auto& [residue, step] : all) {
      if (rule.residues.empty() || rule.residues.back() != residue) {
        rule.residues.push_back(residue);
        rule.first.push_back(int32_t(rule.steps.size()));
      }
      rule.steps.push_back(step);
    }
    rule.first.push_back(int32_t(rule.steps.size()));
    int64_t count = 1;
    for (int by : stride) count = count * by > most_numbered ? 0 : count * by;
    rule.by_number.assign(count, -1);
    for (size_t c = 0; c < rule.residues.size() && count; ++c)
      rule.by_number[rule.number(rule.residues[c])] = int32_t(c);
    rule.classed = true;
    return rule;
  }

  // Writes floor(row / divide) * multiply; returns the row's class, or -1 where it has no targets.
  template <int columns>
  int base(const int32_t* row, int64_t* out) const {
    Wide residue{};
    out[0] = row[0];
    for (int j = 1; j < columns; ++j) {
      int32_t cell = floor_divide(row[j], divide[j]);
      residue[j] = row[j] - int64_t(cell) * divide[j];
      out[j] = int64_t(cell) * multiply[j];
    }
    if (!classed) return 0;
    if (!by_number.empty()) return by_number[number<columns>(residue)];
    auto at = std::lower_bound(residues.begin(), residues.end(), residue);
    return at == residues.end() || *at != residue ? -1 : int(at - residues.begin());
  }

  // The ranges of the targets of rows with these ranges.
  Ranges ranges(const Ranges& of) const {
    Ranges r = of;
    for (int j = 1; j < columns; ++j) {
      Range step = steps.empty() ? Range{0, 0} : Range{steps[0][j], steps[0][j]};
      for (auto& s : steps) step = {std::min(step.low, s[j]), std::max(step.high, s[j])};
      r[j] = {int64_t(floor_divide(int32_t(of[j].low), divide[j])) * multiply[j] + step.low,
              int64_t(floor_divide(int32_t(of[j].high), divide[j])) * multiply[j] + step.high};
    }
    return r;
  }

 private:
  static constexpr int64_t most_numbered = 4096;
  bool classed = false;

  explicit TargetRule(int columns) : columns(columns) {
    divide.fill(1);
    multiply.fill(1);
  }
  template <int columns = most_columns>
  int64_t number(const Wide& residue) const {
    int64_t n = 0;
    for (int j = 1; j < columns; ++j) n = n * divide[j] + residue[j];
    return n;
  }
  static int32_t floor_divide(int32_t a, int32_t b) {
    int32_t q = a / b;
    return q - (a - q * b < 0);
  }
};

// The steps as additions to keys. Steps that lie within 64 keys of one another are one addition and a bit mask.
struct KeySteps {
  struct Step {
    uint64_t delta, mask;
  };
  std::vector<Step> steps;
  std::vector<int32_t> first;

  KeySteps(const TargetRule& of, const Box& box) {
    std::vector<int64_t> deltas;
    for (size_t c = 0; c + 1 < of.first.size(); ++c) {
      first.push_back(int32_t(steps.size()));
      deltas.clear();
      // A step may be larger than the box; the difference of two steps is not, so differences are sorted.
      uint64_t origin = of.steps.empty() ? 0 : box.delta(of.steps[of.first[c]].data());
      for (int s = of.first[c]; s < of.first[c + 1]; ++s)
        deltas.push_back(int64_t(box.delta(of.steps[s].data()) - origin));
      std::sort(deltas.begin(), deltas.end());
      for (size_t i = 0, start = 0; i < deltas.size(); ++i) {
        if (i == 0 || deltas[i] - deltas[start] >= 64) {
          start = i;
          steps.push_back({origin + uint64_t(deltas[i]), 0});
        }
        steps.back().mask |= uint64_t(1) << (deltas[i] - deltas[start]);
      }
    }
    first.push_back(int32_t(steps.size()));
  }
};

}  // namespace lattice
