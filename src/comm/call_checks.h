// src/comm/call_checks.h - whether the tensors of a collective fit together.
//
// Internal. What is wrong with one call is an `ArgumentError` on the rank that made it, before the
// others hear of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <vector>

namespace accelerate::detail {

/// The time limit of a call: its own, or that of the group where it has none.
[[nodiscard]] std::chrono::milliseconds chosen_timeout(std::chrono::milliseconds of_call,
                                                       std::chrono::milliseconds of_group);

[[nodiscard]] const at::Tensor& only_one(const std::vector<at::Tensor>& tensors, const char* kind);
[[nodiscard]] const std::vector<at::Tensor>& only_one(
    const std::vector<std::vector<at::Tensor>>& lists, const char* kind);

void check_count(const char* kind, const char* what, std::size_t count, int size);
void check_rank(const char* kind, const char* what, std::int64_t rank, int size);
/// Parts that travel between ranks have one shape, up to how the elements are arranged.
void check_like(const char* kind, const at::Tensor& tensor, const at::Tensor& like);
/// `whole` holds a part for each of `size` ranks.
void check_whole(const char* kind, const at::Tensor& whole, const at::Tensor& part, int size);
/// A result for each input.
void check_pairs(const char* kind, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs);

}  // namespace accelerate::detail
