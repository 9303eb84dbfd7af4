// accelerate/fwd.h - forward declarations of LibTorch's and our types.
//
// Enough to write signatures with tensors, modules and process groups without paying for LibTorch's
// headers (up to 20 s per translation unit).
#pragma once

namespace at {
class Tensor;
struct Generator;
}  // namespace at

namespace torch {
using at::Tensor;
namespace nn {
class Module;
}
}  // namespace torch

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace accelerate {

class AcceleratorState;
class GradientState;
class PartialState;
class Value;

// As where they are defined: the first declaration says what templates of them are exported.
#pragma GCC visibility push(default)
struct DataLoaderConfiguration;
struct GradientAccumulationPlugin;
struct InitProcessGroupKwargs;
struct TorchDynamoPlugin;
struct TorchTensorParallelPlugin;
#pragma GCC visibility pop

}  // namespace accelerate
