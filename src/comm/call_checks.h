// src/comm/call_checks.h - checks that the tensors of a collective fit together.
//
// Internal. Each check throws `ArgumentError` on the rank that made the call, before it is
// announced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::detail::comm {

/// Why a tensor cannot be sent, e.g. "nested" or "of layout Sparse"; "" if it can.
[[nodiscard]] std::string not_dense(const at::Tensor& tensor);
/// The tensor is dense and on the CPU.
void check_dense(const char* kind, const at::Tensor& tensor);
void check_dtype(const char* kind, const at::Tensor& tensor, const at::Tensor& like);

[[nodiscard]] const at::Tensor& only_one(const std::vector<at::Tensor>& tensors, const char* kind);
[[nodiscard]] const std::vector<at::Tensor>& only_one(
    const std::vector<std::vector<at::Tensor>>& lists, const char* kind);

void check_count(const char* kind, const char* what, std::size_t count, int size);
void check_rank(const char* kind, const char* what, std::int64_t rank, int size);
/// Tensors exchanged between ranks agree in dtype and number of elements.
void check_like(const char* kind, const at::Tensor& tensor, const at::Tensor& like);
/// `whole` holds a part for each of `size` ranks.
void check_whole(const char* kind, const at::Tensor& whole, const at::Tensor& part, int size);
/// There is one result for each input.
void check_pairs(const char* kind, const std::vector<at::Tensor>& outputs,
                 const std::vector<at::Tensor>& inputs);

}  // namespace accelerate::detail::comm
