// accelerate/data/collate.h - how samples become a batch by default.
//
//     DefaultCollate{}(std::vector<std::pair<at::Tensor, int>>{...})  // pair of tensors
//
// Tensors are stacked. Numbers become a tensor of one dimension: bool stays, integers are int64,
// float and double are float32 and float64. Strings become a list of them. Pairs, tuples, arrays,
// lists of equal length, maps, optionals, torch::data::Example and `Value` are taken apart and put
// together again. So is a struct with `tensor_tree_fields` (accelerate/tree.h) whose fields have
// the same type in a batch, as tensors do; where they do not, name the struct that is a batch, with
// the same fields in the same order:
//
//     struct Sample { at::Tensor image; int label; };
//     struct Batch { at::Tensor image, label; };
//     constexpr std::type_identity<Batch> collated_as(std::type_identity<Sample>) { return {}; }
#pragma once

#include <vector>

#include "accelerate/detail/data/collate.h"

namespace accelerate {

/// The rules above as a function object. Throws `ArgumentError` with the path of the leaf and both
/// shapes where samples do not fit together.
struct DefaultCollate {
  template <class T>
  [[nodiscard]] auto operator()(std::vector<T> samples) const {
    return detail::data::collate_samples(samples, {});
  }
};

}  // namespace accelerate
