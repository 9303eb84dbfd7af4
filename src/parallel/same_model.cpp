#include "parallel/same_model.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "comm/call_facts.h"
#include "core/text.h"

namespace accelerate::detail::parallel {

std::string described(const std::string& name, const at::Tensor& tensor, const std::string& unit) {
  return detail::str(name, " ", comm::dtype_literal(tensor.scalar_type()), tensor.sizes(),
                     unit.empty() ? "" : " of unit " + unit);
}

void check_same_model(const std::vector<std::string>& facts,
                      const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto all = accelerate::gather_object(std::vector<std::vector<std::string>>{facts}, group);
  const auto text = [](const auto& list, std::size_t i) {
    return i < list.size() ? list[i] : std::string("nothing");
  };
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    for (std::size_t i = 0; i < std::max(all[0].size(), all[rank].size()); ++i) {
      if (text(all[0], i) == text(all[rank], i)) continue;
      throw CommError(str("The models of the processes differ, so that their gradients cannot be "
                          "averaged: parameter ",
                          i, " is ", text(all[0], i), " on rank 0 and ", text(all[rank], i),
                          " on rank ", rank, ". Build the same model everywhere."),
                      static_cast<int>(rank));
    }
  }
}

}  // namespace accelerate::detail::parallel
