// src/parallel/same_model.h - compares the models of processes before they are trained together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "accelerate/fwd.h"

namespace accelerate::detail::parallel {

/// "weight float32[3, 4]", and the unit it is in, if any.
[[nodiscard]] std::string described(const std::string& name, const at::Tensor& tensor,
                                    const std::string& unit = "");

/// Collective. Throws `CommError` on all processes that names the first of `facts`, which describe
/// the parameters in order, that another process has in another way.
void check_same_model(const std::vector<std::string>& facts,
                      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace accelerate::detail::parallel
