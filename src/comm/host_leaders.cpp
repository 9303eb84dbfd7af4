#include "comm/host_leaders.h"

#include <ATen/ATen.h>

#include <utility>

#include "comm/shm_reduce.h"

namespace accelerate::detail::comm {
namespace {

// Up to this many bytes each leader reduces everything, which takes one message instead of two.
constexpr std::int64_t kShort = 32 << 10;

// Where the share of a host begins. Elements are not cut.
std::int64_t share_begin(std::int64_t bytes, int host, int count, std::int64_t element) {
  return bytes / element * host / count * element;
}

}  // namespace

HostLeaders::HostLeaders(c10::intrusive_ptr<c10d::Backend> gloo,
                         const std::shared_ptr<GroupGuard>& guard)
    : gloo_(std::move(gloo)),
      messages_(*gloo_, guard),
      own_(gloo_->getRank()),
      count_(gloo_->getSize()) {}

// From and to every other host.
void HostLeaders::exchange(const CallPart& call, const std::vector<at::Tensor>& arriving,
                           const std::vector<at::Tensor>& leaving) {
  std::vector<PeerMessage> in;
  std::vector<PeerMessage> out;
  // Each starts with its neighbour, so that not all send to the same one at first.
  for (int step = 1; step < count_; ++step) {
    const int from = (own_ + count_ - step) % count_;
    const int to = (own_ + step) % count_;
    in.push_back({from, arriving[static_cast<std::size_t>(from)]});
    out.push_back({to, leaving[static_cast<std::size_t>(to)]});
  }
  messages_.exchange(call.ticket, in, out, call.timeout);
}

void HostLeaders::barrier(const CallPart& call) {
  const auto ones = at::ones({count_, 1}, at::kByte);
  all_gather(call, ones.unbind());
}

void HostLeaders::all_gather(const CallPart& call, const std::vector<at::Tensor>& blocks) {
  exchange(call, blocks,
           std::vector<at::Tensor>(blocks.size(), blocks[static_cast<std::size_t>(own_)]));
}

// Each leader reduces its share of the data and sends it to the others; little data is reduced by
// each leader as a whole.
void HostLeaders::all_reduce(const CallPart& call, const at::Tensor& data,
                             const ShmArithmetic& arithmetic) {
  const auto bytes = data.numel();
  const auto element = static_cast<std::int64_t>(bytes_of(arithmetic.element));
  const bool whole = bytes <= kShort;
  std::vector<at::Tensor> shares;
  for (int host = 0; host < count_; ++host) {
    const auto begin = whole ? 0 : share_begin(bytes, host, count_, element);
    const auto end = whole ? bytes : share_begin(bytes, host + 1, count_, element);
    shares.push_back(data.narrow(0, begin, end - begin));
  }
  const auto& own = shares[static_cast<std::size_t>(own_)];
  const auto parts = at::empty({count_, own.numel()}, data.options());
  exchange(call, parts.unbind(), shares);

  auto* result = static_cast<std::byte*>(own.mutable_data_ptr());
  std::vector<const std::byte*> sources;
  for (int host = 0; host < count_; ++host) {
    sources.push_back(host == own_ ? result
                                   : static_cast<const std::byte*>(parts.const_data_ptr()) +
                                         host * own.numel());
  }
  reduce_elements(arithmetic.element, arithmetic.reduction, sources, result, nullptr,
                  static_cast<std::size_t>(own.numel() / element));
  if (!whole) all_gather(call, shares);
}

// Along a tree: a host gets it from the one whose number, counted from the root, lacks its highest
// bit.
void HostLeaders::broadcast(const CallPart& call, const at::Tensor& data, int root) {
  const int place = (own_ - root + count_) % count_;
  const auto at_place = [&](int other) { return (root + other) % count_; };
  int bit = 1;
  while (bit <= place) bit *= 2;
  if (place > 0)
    messages_.exchange(call.ticket, {{at_place(place - bit / 2), data}}, {}, call.timeout);
  std::vector<PeerMessage> leaving;
  for (; place + bit < count_; bit *= 2) leaving.push_back({at_place(place + bit), data});
  if (!leaving.empty()) messages_.exchange(call.ticket, {}, leaving, call.timeout);
}

}  // namespace accelerate::detail::comm
