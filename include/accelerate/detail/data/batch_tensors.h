// accelerate/detail/data/batch_tensors.h - the tensors of a batch, made from those of samples or
// datasets.
//
// Internal to accelerate/data_loader.h. Nothing that comes back shares memory with what it was made
// from.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/api.h"
#include "accelerate/data/batch_samplers.h"
#include "accelerate/detail/state/reused_memory.h"
#include "accelerate/tree.h"

namespace accelerate::detail::data {

/// Samples, or parts of them, that are numbers, texts, or of a type that names its batch type.
template <class T>
concept NumericSample =
    std::is_arithmetic_v<T> || std::same_as<T, c10::Half> || std::same_as<T, c10::BFloat16>;
template <class T>
concept TextSample = std::convertible_to<const T&, std::string_view>;
template <class T>
concept NamesBatch = requires { collated_as(std::type_identity<T>{}); };

/// What a number is in a batch.
template <NumericSample T>
using ColumnType = std::conditional_t<std::integral<T> && !std::same_as<T, bool>, std::int64_t, T>;

class RowsInPlace;

/// How a batch is made, wherever that happens.
struct LoadContext {
  /// Into page-locked memory.
  bool pinned = false;
  /// One batch may use all cores: no other thread is loading.
  bool parallel = false;
  std::shared_ptr<state::ReusedMemory> memory = nullptr;
  /// Set where tensors were put into the batch as the samples were read.
  RowsInPlace* in_place = nullptr;
};

/// The tensors of a batch, filled as its samples are read: while a sample is in the cache, and so
/// that the next one gets its memory.
class ACCELERATE_API RowsInPlace {
 public:
  RowsInPlace(std::size_t rows, const LoadContext& context) : rows_(rows), context_(&context) {}

  /// Moves tensor number `leaf` of sample `row` into the batch, and puts the tensor of the batch in
  /// its place. What does not fit with the first sample stays as it is.
  void move_in(std::size_t leaf, std::size_t row, at::Tensor& tensor);

  /// The tensor of the batch, if all of `samples` are in it, each in its row. Undefined if not:
  /// then those that were moved in are rows of it now.
  [[nodiscard]] at::Tensor whole(const std::vector<at::Tensor*>& samples) const;

 private:
  std::size_t rows_;
  const LoadContext* context_;
  std::vector<at::Tensor> tensors_;  // undefined where samples cannot be moved in
};

/// The tensors of batches, made where `context` wants them.
struct ACCELERATE_API BatchTensors {
  /// Rows of a tensor, in the order of `rows`. Throws `ArgumentError` for a row that is not there.
  [[nodiscard]] static at::Tensor rows(const at::Tensor& tensor, const IndexBatch& rows,
                                       const LoadContext& context);
  /// One row, without the dimension of the rows.
  [[nodiscard]] static at::Tensor row(const at::Tensor& tensor, std::int64_t row,
                                      const LoadContext& context);
  /// The tensors behind one another along a new dimension 0. Throws `ArgumentError` with the path
  /// and both shapes where they differ.
  [[nodiscard]] static at::Tensor stack(const std::vector<at::Tensor*>& samples,
                                        const TreePath& path, const LoadContext& context);
  /// [size], to be filled in.
  [[nodiscard]] static at::Tensor empty_column(std::size_t size, at::ScalarType type,
                                               const LoadContext& context);
  /// The tensor in page-locked memory, where that is asked for and it is not there already.
  [[nodiscard]] static at::Tensor pin(const at::Tensor& tensor, const LoadContext& context);
  /// A number made of the first and the last row of each tensor.
  [[nodiscard]] static std::uint64_t fingerprint(const std::vector<at::Tensor>& tensors);
};

/// The batch with its tensors in page-locked memory, where that is asked for.
template <class Batch>
[[nodiscard]] Batch pinned(Batch batch, const LoadContext& context) {
  if constexpr (TensorTree<Batch>) {
    if (context.pinned) {
      return tree::map([&](const at::Tensor& leaf) { return BatchTensors::pin(leaf, context); },
                       std::move(batch));
    }
  }
  return batch;
}

/// The common length of a dataset's tensors. Throws `ArgumentError` where they differ, or there is
/// none.
class ACCELERATE_API CommonLength {
 public:
  void add(const TreePath& path, const at::Tensor& tensor);
  [[nodiscard]] std::int64_t get() const;

 private:
  std::int64_t length_ = -1;
  std::string first_path_ = {};
};

}  // namespace accelerate::detail::data
