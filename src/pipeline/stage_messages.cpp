#include "pipeline/stage_messages.h"

#include <ATen/ATen.h>

#include "accelerate/errors.h"
#include "core/text.h"

namespace accelerate::detail::pipeline {
namespace {

/// The facts of a message as numbers: how many tensors, then type, gradient, dimensions and sizes
/// of each.
constexpr std::size_t kNumbers = 96;

std::string shown(const MessageFacts& facts) {
  std::vector<std::string> all;
  for (const auto& one : facts) {
    all.push_back(str(c10::toString(one.dtype), "[", join(one.sizes), "]",
                      one.requires_grad ? "" : " without gradient"));
  }
  return join(all);
}

at::Tensor encoded(const MessageFacts& facts) {
  std::vector<std::int64_t> numbers{static_cast<std::int64_t>(facts.size())};
  for (const auto& one : facts) {
    numbers.push_back(static_cast<std::int64_t>(one.dtype));
    numbers.push_back(one.requires_grad ? 1 : 0);
    numbers.push_back(static_cast<std::int64_t>(one.sizes.size()));
    numbers.insert(numbers.end(), one.sizes.begin(), one.sizes.end());
  }
  if (numbers.size() > kNumbers) {
    throw UnsupportedError(str("A layer at the end of a stage gives ", facts.size(),
                               " tensors, too many to send to the next stage. Cut the model where "
                               "fewer tensors pass."));
  }
  numbers.resize(kNumbers, 0);
  return at::tensor(numbers, at::kLong);
}

MessageFacts decoded(const at::Tensor& tensor) {
  const auto* next = tensor.const_data_ptr<std::int64_t>();
  MessageFacts facts(static_cast<std::size_t>(*next++));
  for (auto& one : facts) {
    one.dtype = static_cast<at::ScalarType>(*next++);
    one.requires_grad = *next++ != 0;
    const auto dimensions = *next++;
    one.sizes.assign(next, next + dimensions);
    next += dimensions;
  }
  return facts;
}

}  // namespace

MessageFacts facts_of(const PipelineTensors& tensors) {
  MessageFacts facts;
  for (const auto& one : tensors) {
    facts.push_back({one.scalar_type(), one.requires_grad(), one.sizes().vec()});
  }
  return facts;
}

void StageMessages::send(const MessageAddress& to, const PipelineTensors& tensors,
                         std::optional<std::uint64_t> key) {
  auto facts = facts_of(tensors);
  bool says = true;
  if (key) {
    const auto [known, is_new] = sent_.try_emplace({to.tag, *key}, facts);
    says = is_new;
    if (known->second != facts) {
      throw StateError(str("The last layer of the stage gives ", shown(facts), ", but gave ",
                           shown(known->second),
                           " before for inputs of the same shapes. Set variable_shapes of "
                           "PipelineOptions if shapes change, or if layers are frozen or unfrozen "
                           "between steps."));
    }
  }
  if (to.peer != rank_ && says) post(to, encoded(facts));
  if (to.peer != rank_) return send_known(to, tensors);
  PipelineTensors own;
  for (const auto& one : tensors) {
    own.push_back(one.detach().requires_grad_(one.requires_grad()));
  }
  own_[to.tag].push_back(std::move(own));
}

PipelineTensors StageMessages::receive(const MessageAddress& from,
                                       std::optional<std::uint64_t> key) {
  if (from.peer == rank_) {
    auto& waiting = own_[from.tag];
    auto tensors = std::move(waiting.front());
    waiting.pop_front();
    return tensors;
  }
  MessageFacts facts;
  const auto known = key ? received_.find({from.tag, *key}) : received_.end();
  if (known != received_.end()) {
    facts = known->second;
  } else {
    auto numbers = at::empty({static_cast<std::int64_t>(kNumbers)}, at::kLong);
    take(from, numbers);
    facts = decoded(numbers);
    if (key) received_[{from.tag, *key}] = facts;
  }
  auto tensors = receive_known(from, facts);
  for (std::size_t i = 0; i < facts.size(); ++i) tensors[i].requires_grad_(facts[i].requires_grad);
  return tensors;
}

void StageMessages::send_known(const MessageAddress& to, const PipelineTensors& tensors) {
  if (to.peer == rank_) {
    own_[to.tag].push_back(tensors);
    return;
  }
  for (const auto& one : tensors) {
    if (one.numel() > 0) post(to, one.detach().to(at::kCPU).contiguous());
  }
}

PipelineTensors StageMessages::receive_known(const MessageAddress& from,
                                             const MessageFacts& facts) {
  if (from.peer == rank_) return receive(from, std::nullopt);
  PipelineTensors tensors;
  for (const auto& one : facts) {
    auto tensor = at::empty(one.sizes, at::TensorOptions(one.dtype));
    if (tensor.numel() > 0) take(from, tensor);
    tensors.push_back(tensor.to(device_));
  }
  return tensors;
}

void StageMessages::post(const MessageAddress& to, const at::Tensor& tensor) {
  while (!pending_.empty() && pending_.front().work->isCompleted()) {
    pending_.front().work->wait();
    pending_.pop_front();
  }
  std::vector<at::Tensor> one{tensor};
  auto work = group_->send(one, static_cast<int>(to.peer), to.tag);
  bytes_sent_ += static_cast<std::int64_t>(tensor.nbytes());
  pending_.push_back({std::move(work), tensor});
}

void StageMessages::take(const MessageAddress& from, at::Tensor& tensor) {
  std::vector<at::Tensor> one{tensor};
  group_->recv(one, static_cast<int>(from.peer), from.tag)->wait();
}

void StageMessages::flush() {
  while (!pending_.empty()) {
    pending_.front().work->wait();
    pending_.pop_front();
  }
}

void StageMessages::drop() noexcept {
  pending_.clear();
  own_.clear();
}

}  // namespace accelerate::detail::pipeline
