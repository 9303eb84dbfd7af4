#include "model_parallel/sequence_messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <atomic>
#include <utility>
#include <vector>

#include "accelerate/logging/name_collectives.h"
#include "comm/peers.h"
#include "core/call_site.h"

namespace accelerate::detail::model_parallel {
namespace {

struct Counter {
  std::atomic<std::int64_t> calls = 0;
  std::atomic<std::int64_t> bytes = 0;

  void add(std::int64_t more) {
    ++calls;
    bytes += more;
  }
};
Counter gathers;
Counter exchanges;

c10::intrusive_ptr<c10d::Work> start_all_to_all(const GroupHandle& group, at::Tensor& out,
                                                at::Tensor& in, std::vector<std::int64_t> received,
                                                std::vector<std::int64_t> sent, const char* what) {
  const NamedCollectives named(what);
  const NamedInBackward in_backward;
  return group->alltoall_base(out, in, received, sent, c10d::AllToAllOptions());
}

}  // namespace

SequenceTraffic sequence_traffic() {
  return {gathers.calls, gathers.bytes, exchanges.calls, exchanges.bytes};
}

RingMessage::RingMessage(const GroupHandle& group, at::Tensor mine, const char* what)
    : sent_(mine.flatten()), received_(at::empty_like(mine)) {
  const auto size = static_cast<std::size_t>(group->getSize());
  const auto rank = static_cast<std::size_t>(group->getRank());
  std::vector<std::int64_t> to(size, 0);
  std::vector<std::int64_t> from(size, 0);
  to[(rank + 1) % size] = sent_.numel();
  from[(rank + size - 1) % size] = sent_.numel();
  auto into = received_.flatten();
  exchanges.add(static_cast<std::int64_t>(sent_.nbytes()));
  work_ = start_all_to_all(group, into, sent_, std::move(from), std::move(to), what);
}

at::Tensor RingMessage::wait() {
  work_->wait();
  work_.reset();
  sent_.reset();
  return std::exchange(received_, {});
}

at::Tensor gather_rows(const GroupHandle& group, at::Tensor mine, const char* what) {
  const NamedCollectives named(what);
  const NamedInBackward in_backward;
  const auto ranks = group->getSize();
  auto in = mine.flatten();
  auto out = at::empty({ranks * in.numel()}, in.options());
  gathers.add((ranks - 1) * static_cast<std::int64_t>(in.nbytes()));
  comm::all_gather_into(*group, out, in, c10d::AllgatherOptions())->wait();
  auto shape = mine.sizes().vec();
  shape.insert(shape.begin(), ranks);
  return out.view(shape);
}

at::Tensor exchange_rows(const GroupHandle& group, at::Tensor rows, const char* what) {
  auto out = at::empty_like(rows);
  const auto row = static_cast<std::int64_t>(rows.nbytes()) / group->getSize();
  exchanges.add((group->getSize() - 1) * row);
  start_all_to_all(group, out, rows, {}, {}, what)->wait();
  return out;
}

}  // namespace accelerate::detail::model_parallel
