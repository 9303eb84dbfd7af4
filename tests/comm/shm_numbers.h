// tests/comm/shm_numbers.h - what collectives must give, by arithmetic and by Gloo.
#pragma once

#include <torch/torch.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "comm/samples.h"
#include "comm/shm_ranks.h"

namespace accelerate {

using c10d::ReduceOp;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

/// All dtypes that a tensor of numbers can have.
inline const std::vector<torch::ScalarType> kMoved = {
    torch::kBool,       torch::kByte,         torch::kChar,          torch::kShort,
    torch::kInt,        torch::kLong,         torch::kHalf,          torch::kBFloat16,
    torch::kFloat,      torch::kDouble,       torch::kUInt16,        torch::kUInt32,
    torch::kUInt64,     torch::kComplexFloat, torch::kComplexDouble, torch::kFloat8_e4m3fn,
    torch::kFloat8_e5m2};
inline const std::vector<torch::ScalarType> kReduced(kMoved.begin(), kMoved.end() - 2);

inline bool is_whole(torch::ScalarType dtype) { return c10::isIntegralType(dtype, true); }

inline std::vector<ReduceOp::RedOpType> reductions_of(torch::ScalarType dtype) {
  if (c10::isComplexType(dtype)) return {ReduceOp::SUM, ReduceOp::AVG};
  std::vector<ReduceOp::RedOpType> all = {ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN,
                                          ReduceOp::MAX};
  if (dtype != torch::kBool) all.push_back(ReduceOp::AVG);
  if (is_whole(dtype)) all.insert(all.end(), {ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR});
  return all;
}

/// What arithmetic is done in.
inline torch::ScalarType wide(torch::ScalarType dtype) {
  if (dtype == torch::kBool) return torch::kByte;
  if (is_whole(dtype)) return torch::kLong;
  return dtype == torch::kHalf || dtype == torch::kBFloat16 ? torch::kFloat : dtype;
}

/// In rank order, as the backend promises, rounded once.
inline Tensor reduced(const Tensors& of_ranks, ReduceOp::RedOpType reduction) {
  const auto dtype = of_ranks.front().scalar_type();
  auto result = of_ranks.front().to(wide(dtype));
  for (std::size_t rank = 1; rank < of_ranks.size(); ++rank) {
    const auto next = of_ranks[rank].to(wide(dtype));
    const bool truth = dtype == torch::kBool;
    switch (reduction) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        result = truth ? result | next : result + next;
        break;
      case ReduceOp::PRODUCT:
        result = result * next;
        break;
      case ReduceOp::MIN:
        result = torch::minimum(result, next);
        break;
      case ReduceOp::MAX:
        result = torch::maximum(result, next);
        break;
      case ReduceOp::BAND:
        result = result & next;
        break;
      case ReduceOp::BOR:
        result = result | next;
        break;
      default:
        result = result ^ next;
    }
  }
  if (reduction == ReduceOp::AVG) {
    const auto ranks = static_cast<std::int64_t>(of_ranks.size());
    if (c10::isComplexType(dtype))
      return torch::view_as_complex(torch::view_as_real(result) / ranks);
    result = is_whole(dtype) ? torch::div(result, ranks, "trunc") : result / ranks;
  }
  return result.to(dtype);
}

inline Tensors of_all_ranks(int world, torch::ScalarType dtype, std::int64_t size) {
  Tensors parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(sample(rank, dtype, size));
  return parts;
}

/// Collective. Plain Gloo between the same ranks.
inline c10::intrusive_ptr<c10d::Backend> gloo(ShmRank& self) {
  using Gloo = c10d::ProcessGroupGloo;
  auto options = Gloo::Options::create();
  options->devices.push_back(Gloo::createDeviceForHostname("127.0.0.1"));
  return c10::make_intrusive<Gloo>(c10::make_intrusive<c10d::PrefixStore>("gloo", self.store),
                                   self.rank, self.size, options);
}

}  // namespace accelerate
