#include "model_parallel/ring_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

#include "model_parallel/attention_block.h"

namespace accelerate::detail::model_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kRingForward = "context parallel attention";
constexpr const char* kRingBackward = "gradients of context parallel attention";

/// Keys and values, in one message.
struct KeyValue {
  at::Tensor key;
  at::Tensor value;

  [[nodiscard]] at::Tensor packed() const { return at::cat({key.flatten(), value.flatten()}); }
  [[nodiscard]] KeyValue unpacked(const at::Tensor& flat) const {
    return {flat.narrow(0, 0, key.numel()).view(key.sizes()),
            flat.narrow(0, key.numel(), value.numel()).view(value.sizes())};
  }
};

/// The blocks of a group in the order in which this rank sees them: its own, that of the rank
/// before it, and so on around the ring.
class PassingBlocks {
 public:
  PassingBlocks(const Ring& ring, const KeyValue& own, const char* what)
      : ring_(ring), own_(own), what_(what), current_(own.packed()) {
    if (ring.gathers) all_ = gather_rows(ring.group, current_, what);
  }

  KeyValue next() {
    const int ranks = ring_.group->getSize();
    if (ring_.gathers) {
      const int source = (ring_.group->getRank() - step_++ + ranks) % ranks;
      return own_.unpacked(all_[source]);
    }
    if (step_ > 0) current_ = coming_.wait();
    // The next block is on its way while this one is used.
    if (++step_ < ranks) coming_ = RingMessage(ring_.group, current_, what_);
    return own_.unpacked(current_);
  }

 private:
  const Ring& ring_;
  const KeyValue& own_;
  const char* what_;
  at::Tensor current_;
  at::Tensor all_ = {};
  RingMessage coming_ = {};
  int step_ = 0;
};

/// Which queries of a rank see which keys of a block.
struct Visible {
  bool causal = false;
  bool first_keys_only = false;
  bool last_queries_only = false;

  /// Of the block that comes in this step.
  static Visible in_step(const Ring& ring, int step) {
    if (!ring.causal) return {};
    if (step == 0) return {.causal = true};
    // The block of an earlier rank: its first chunk comes before all queries, its last one after
    // them. That of a later rank: all of it comes between the two chunks of queries.
    const bool earlier = step <= ring.group->getRank();
    return {.first_keys_only = earlier, .last_queries_only = !earlier};
  }

  [[nodiscard]] at::Tensor queries(const at::Tensor& tensor) const {
    const auto half = tensor.size(2) / 2;
    return last_queries_only ? tensor.narrow(2, half, half) : tensor;
  }
  [[nodiscard]] at::Tensor keys(const at::Tensor& tensor) const {
    return first_keys_only ? tensor.narrow(2, 0, tensor.size(2) / 2) : tensor;
  }
};

PartialAttention walk_forward(const at::Tensor& query, const KeyValue& own, const Ring& ring) {
  const auto type = accumulation_type(query);
  PassingBlocks blocks(ring, own, kRingForward);
  PartialAttention all;
  for (int step = 0; step < ring.group->getSize(); ++step) {
    const auto visible = Visible::in_step(ring, step);
    const auto [key, value] = blocks.next();
    const auto block = attend_block(visible.queries(query), visible.keys(key), visible.keys(value),
                                    visible.causal, ring.scale);
    if (step == 0) {
      all = {block.out.to(type, /*non_blocking=*/false, /*copy=*/true),
             block.log_sum.to(type, /*non_blocking=*/false, /*copy=*/true)};
    } else {
      merge({visible.queries(all.out), visible.queries(all.log_sum)}, block);
    }
  }
  return all;
}

/// The gradients of keys and values travel with their block, and are home after a whole round.
AttentionGradients walk_backward(const at::Tensor& gradient, const PartialAttention& all,
                                 const at::Tensor& query, const KeyValue& own, const Ring& ring) {
  const auto type = accumulation_type(query);
  PassingBlocks blocks(ring, own, kRingBackward);
  auto of_query = at::zeros(query.sizes(), query.options().dtype(type));
  RingMessage travelling;
  for (int step = 0; step < ring.group->getSize(); ++step) {
    const auto visible = Visible::in_step(ring, step);
    const auto [key, value] = blocks.next();
    const PartialAttention seen{visible.queries(all.out),
                                visible.queries(all.log_sum).contiguous()};
    const auto block =
        block_gradients(visible.queries(gradient), seen, visible.queries(query), visible.keys(key),
                        visible.keys(value), visible.causal, ring.scale);
    visible.queries(of_query).add_(block.query);
    auto sums = step == 0 ? at::zeros({own.key.numel() + own.value.numel()}, of_query.options())
                          : travelling.wait();
    const auto of_block = own.unpacked(sums);
    visible.keys(of_block.key).add_(block.key);
    visible.keys(of_block.value).add_(block.value);
    travelling = RingMessage(ring.group, std::move(sums), kRingBackward);
  }
  auto [of_key, of_value] = own.unpacked(travelling.wait());
  return {std::move(of_query), std::move(of_key), std::move(of_value)};
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& query,
                            const at::Tensor& key, const at::Tensor& value,
                            const c10::intrusive_ptr<Ring>& ring) {
    const auto all = walk_forward(query, {key, value}, *ring);
    auto out = all.out.to(query.scalar_type());
    context->save_for_backward({query, key, value, out, all.log_sum});
    context->saved_data["ring"] = c10::IValue::make_capsule(ring);
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto ring =
        c10::static_intrusive_pointer_cast<Ring>(context->saved_data["ring"].toCapsule());
    const auto saved = context->get_saved_variables();
    const auto& query = saved[0];
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    auto result = walk_backward(gradients[0].contiguous(), {saved[3], saved[4]}, query,
                                {saved[1], saved[2]}, *ring);
    return {result.query.to(query.scalar_type()), result.key.to(saved[1].scalar_type()),
            result.value.to(saved[2].scalar_type()), at::Tensor()};
  }
};

}  // namespace

at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const c10::intrusive_ptr<Ring>& ring) {
  return RingAttention::apply(query, key, value, ring);
}

}  // namespace accelerate::detail::model_parallel
