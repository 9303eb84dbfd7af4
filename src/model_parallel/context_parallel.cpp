#include "model_parallel/context_parallel.h"

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "accelerate/errors.h"
#include "accelerate/parallel/context_parallel.h"
#include "accelerate/parallelism_config.h"
#include "accelerate/state.h"
#include "core/call_site.h"
#include "core/text.h"
#include "model_parallel/attention_calls.h"
#include "model_parallel/ring_attention.h"

namespace accelerate {
namespace detail::model_parallel {
namespace {

/// Throws `ArgumentError` for another name.
bool gathers(const std::string& strategy) {
  if (strategy == "allgather" || strategy == "alltoall") return strategy == "allgather";
  throw ArgumentError(
      detail::str("cp_comm_strategy is '", strategy, "'. Choose one of: allgather, alltoall."));
}

std::string strategy_of_run() {
  const auto config =
      AcceleratorState::initialized() ? AcceleratorState().parallelism_config() : nullptr;
  const bool told = config && config->cp_handler && config->cp_handler->cp_comm_strategy;
  return told ? *config->cp_handler->cp_comm_strategy : "allgather";
}

/// `call` is checked.
at::Tensor attend_over_ring(const state::AttentionCall& call, const GroupHandle& group,
                            bool all_at_once, std::string_view what) {
  const auto length = call.query.size(2);
  if (call.is_causal && length % 2 != 0) {
    throw ArgumentError(
        detail::str(what, ": this process has ", length,
                    " positions, but two chunks of equal length are needed. Cut sequences "
                    "whose length is a multiple of ",
                    2 * group->getSize(), "."));
  }
  if (call.dropout_p != 0) {
    throw UnsupportedError(
        detail::str(what, ": dropout_p is ", call.dropout_p,
                    ", but attention over several processes has no dropout. Set it to "
                    "0, or drop elements of its result."));
  }
  auto ring = c10::make_intrusive<Ring>();
  ring->group = group;
  ring->gathers = all_at_once;
  ring->causal = call.is_causal;
  ring->scale = scale_of(call);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return ring_attention(call.query, call.key, call.value, ring);
}

at::Tensor attend(state::AttentionCall call, const GroupHandle& group, bool all_at_once,
                  std::string_view what) {
  state::note_attention();
  const bool one_head = call.query.dim() == 3 && call.key.dim() == 3 && call.value.dim() == 3;
  if (one_head) {
    for (auto* tensor : {&call.query, &call.key, &call.value}) *tensor = tensor->unsqueeze(1);
  }
  const auto out = attend_over_ring(checked(std::move(call), what), group, all_at_once, what);
  return one_head ? out.squeeze(1) : out;
}

// ---- head-tail order ----------------------------------------------------------------------------

/// Where the two chunks of a rank begin, and their length.
struct Chunks {
  std::int64_t length = 0;
  std::int64_t head = 0;
  std::int64_t tail = 0;

  Chunks(std::int64_t total, int ranks, int rank)
      : length(total / (2 * ranks)), head(rank * length), tail((2 * ranks - 1 - rank) * length) {}
};

at::Tensor shard(const at::Tensor& tensor, std::int64_t dim, const GroupHandle& group,
                 const std::string& what) {
  if (!tensor.defined() || dim < -tensor.dim() || dim >= tensor.dim()) {
    throw ArgumentError(detail::str(
        what, " ",
        tensor.defined() ? detail::str("of shape ", tensor.sizes(), " has no dimension ")
                         : std::string("is not defined: it has no dimension "),
        dim, "."));
  }
  const auto total = tensor.size(dim);
  const auto ranks = group->getSize();
  if (total % (2 * ranks) != 0) {
    throw ArgumentError(detail::str(what, " of shape ", tensor.sizes(), " has length ", total,
                                    " in dimension ", dim, ", which must be a multiple of ",
                                    2 * ranks,
                                    ", twice the size of the group. Pad it: labels with -100."));
  }
  const Chunks chunks(total, ranks, group->getRank());
  return at::cat({tensor.narrow(dim, chunks.head, chunks.length),
                  tensor.narrow(dim, chunks.tail, chunks.length)},
                 dim);
}

// ---- the scope ----------------------------------------------------------------------------------

/// Graphs that saved a tensor notice that it is another one now.
void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  tensor.set_data(data);
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void check_buffers(const SequenceBuffers& buffers) {
  const auto is_in = [](const std::vector<at::Tensor>& tensors, const at::Tensor& one) {
    return std::ranges::count_if(tensors, [&](const auto& each) { return each.is_same(one); });
  };
  if (buffers.tensors.size() != buffers.dims.size()) {
    throw ArgumentError(detail::str("maybe_context_parallel: there are ", buffers.tensors.size(),
                                    " buffers, but ", buffers.dims.size(),
                                    " buffer_seq_dims. Give one for each buffer."));
  }
  for (std::size_t i = 0; i < buffers.tensors.size(); ++i) {
    const auto& one = buffers.tensors[i];
    if (one.defined() && one.requires_grad()) {
      throw ArgumentError(
          detail::str("maybe_context_parallel: buffer ", i,
                      " requires grad, so that it "
                      "cannot be cut in place. Take the rows of a trained table by position "
                      "ids that are among the buffers."));
    }
    if (is_in(buffers.tensors, one) > 1) {
      throw ArgumentError(detail::str("maybe_context_parallel: buffer ", i, " is given twice."));
    }
  }
  for (const auto& one : buffers.not_restored) {
    if (is_in(buffers.tensors, one) == 0) {
      throw ArgumentError(
          "maybe_context_parallel: a tensor of no_restore_buffers is not among the buffers.");
    }
  }
}

class ContextParallel {
 public:
  ContextParallel(const SequenceBuffers& buffers, const GroupHandle& group,
                  state::AttentionRulePtr rule) {
    check_buffers(buffers);
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> parts;
    for (std::size_t i = 0; i < buffers.tensors.size(); ++i) {
      parts.push_back(shard(buffers.tensors[i], buffers.dims[i], group,
                            detail::str("maybe_context_parallel: buffer ", i)));
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto& buffer = buffers.tensors[i];
      const auto kept = std::ranges::any_of(buffers.not_restored,
                                            [&](const auto& one) { return one.is_same(buffer); });
      if (!kept) changed_.emplace_back(buffer, buffer.detach());
      replace_data(buffer, parts[i]);
    }
    attention_.emplace(std::move(rule));
  }
  ~ContextParallel() {
    if (attention_ && std::uncaught_exceptions() == exceptions_before_) {
      warn_without_attention(*attention_, "cp_size");
    }
    for (const auto& [buffer, whole] : changed_) replace_data(buffer, whole);
  }
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

 private:
  /// Each buffer with the tensor that it was.
  std::vector<std::pair<at::Tensor, at::Tensor>> changed_ = {};
  std::optional<state::AttentionRuleScope> attention_ = std::nullopt;
  int exceptions_before_ = std::uncaught_exceptions();
};

}  // namespace

std::shared_ptr<void> enter_context_parallel(const SequenceBuffers& buffers,
                                             const GroupHandle& group,
                                             const std::string& cp_comm_strategy) {
  const auto rule = [group, all_at_once = gathers(cp_comm_strategy)](state::AttentionCall call) {
    return attend(std::move(call), group, all_at_once,
                  "scaled_dot_product_attention within maybe_context_parallel");
  };
  return std::make_shared<ContextParallel>(buffers, group,
                                           std::make_shared<const state::AttentionRule>(rule));
}

}  // namespace detail::model_parallel

using detail::model_parallel::group_or_mesh;

at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key,
                                      const at::Tensor& value,
                                      const ContextParallelAttentionOptions& options,
                                      std::source_location where) {
  constexpr const char* kName = "context_parallel_attention";
  const detail::AtCallSite here(where);
  const auto group = group_or_mesh(options.group, "cp", kName);
  const auto strategy =
      options.cp_comm_strategy.value_or(detail::model_parallel::strategy_of_run());
  return detail::model_parallel::attend({.query = query,
                                         .key = key,
                                         .value = value,
                                         .is_causal = options.is_causal,
                                         .scale = options.scale,
                                         .enable_gqa = options.enable_gqa},
                                        group, detail::model_parallel::gathers(strategy), kName);
}

at::Tensor context_parallel_shard(const at::Tensor& tensor, std::int64_t dim,
                                  const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  constexpr const char* kName = "context_parallel_shard";
  return detail::model_parallel::shard(tensor, dim, group_or_mesh(group, "cp", kName),
                                       detail::str(kName, ": the tensor"));
}

at::Tensor context_parallel_unshard(const at::Tensor& tensor, std::int64_t dim,
                                    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                    std::source_location where) {
  constexpr const char* kName = "context_parallel_unshard";
  const detail::AtCallSite here(where);
  const auto ranks = group_or_mesh(group, "cp", kName);
  if (!tensor.defined() || dim < -tensor.dim() || dim >= tensor.dim() ||
      tensor.size(dim) % 2 != 0) {
    throw ArgumentError(detail::str(kName, ": the tensor has no two chunks of equal length in ",
                                    "dimension ", dim, "."));
  }
  const auto all = detail::model_parallel::gather_rows(ranks, tensor.detach().contiguous(), kName);
  const auto half = tensor.size(dim) / 2;
  std::vector<at::Tensor> chunks(static_cast<std::size_t>(2 * ranks->getSize()));
  for (int rank = 0; rank < ranks->getSize(); ++rank) {
    const auto part = all[rank];
    chunks[static_cast<std::size_t>(rank)] = part.narrow(dim, 0, half);
    chunks[chunks.size() - 1 - static_cast<std::size_t>(rank)] = part.narrow(dim, half, half);
  }
  return at::cat(chunks, dim);
}

}  // namespace accelerate
