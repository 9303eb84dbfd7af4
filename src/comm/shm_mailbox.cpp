#include "comm/shm_mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using Clock = WaitBudget::Clock;

// The background thread checks this often for messages without a waiting thread, until there have
// been none for a while. Waking it for every message would cost more than the message.
constexpr auto kTick = std::chrono::milliseconds(1);
constexpr int kTicksBeforeRest = 50;

// Bytes into a ring, as many as fit.
std::size_t put(const ShmSegment& segment, int from, int to, const std::byte* data,
                std::size_t bytes) {
  auto& ring = segment.ring(from, to);
  const auto capacity = segment.ring_bytes();
  const auto written = ring.written.load(std::memory_order_relaxed);
  const auto room = capacity - (written - ring.read.load(std::memory_order_acquire));
  const auto n = std::min<std::size_t>(bytes, room);
  if (n == 0) return 0;
  std::byte* memory = segment.ring_data(from, to);
  const auto at = written % capacity;
  const auto before_end = std::min<std::size_t>(n, capacity - at);
  std::memcpy(memory + at, data, before_end);
  if (n > before_end) std::memcpy(memory, data + before_end, n - before_end);
  ring.written.store(written + n, std::memory_order_release);
  return n;
}

std::size_t available(const ShmSegment& segment, int from, int to) {
  const auto& ring = segment.ring(from, to);
  return ring.written.load(std::memory_order_acquire) - ring.read.load(std::memory_order_relaxed);
}

std::size_t room(const ShmSegment& segment, int from, int to) {
  const auto& ring = segment.ring(from, to);
  return segment.ring_bytes() -
         (ring.written.load(std::memory_order_relaxed) - ring.read.load(std::memory_order_acquire));
}

// Bytes out of a ring; null drops them.
std::size_t take(const ShmSegment& segment, int from, int to, std::byte* data, std::size_t bytes) {
  auto& ring = segment.ring(from, to);
  const auto capacity = segment.ring_bytes();
  const auto n = std::min(bytes, available(segment, from, to));
  if (n == 0) return 0;
  const auto read = ring.read.load(std::memory_order_relaxed);
  if (data != nullptr) {
    const std::byte* memory = segment.ring_data(from, to);
    const auto at = read % capacity;
    const auto before_end = std::min<std::size_t>(n, capacity - at);
    std::memcpy(data, memory + at, before_end);
    if (n > before_end) std::memcpy(data + before_end, memory, n - before_end);
  }
  ring.read.store(read + n, std::memory_order_release);
  return n;
}

}  // namespace

ShmMailbox::ShmMailbox(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard)
    : segment_(std::move(segment)), guard_(std::move(guard)) {
  const auto size = static_cast<std::size_t>(segment_->size());
  outgoing_.resize(size);
  prepared_.resize(size);
  inboxes_.resize(size);
}

void ShmMailbox::close() noexcept {
  segment_->close();
  Finished finished;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    fail_all({ShmFault::kClosed, segment_->rank()}, finished);
    report(lock, finished);
  }
  attention_.notify_all();
  if (!background_.joinable()) return;
  // A callback on this thread may release the last reference to the mailbox.
  if (background_.get_id() == std::this_thread::get_id()) {
    background_.detach();
  } else {
    background_.join();
  }
}

void ShmMailbox::send(const ShmMessagePtr& message) {
  owner_.refuse_forked_copy("send");
  std::unique_lock lock(mutex_);
  Finished finished;
  message->since = Clock::now();
  if (!prepared_[message->peer]) prepared_[message->peer] = segment_->prepare_ring(message->peer);
  if (!prepared_[message->peer]) {
    message->problem = str("no ", segment_->ring_bytes() >> 10,
                           " KiB of shared memory for messages to rank ", message->peer);
    message->done = true;
    finished.push_back(message);
  } else {
    outgoing_[message->peer].push_back(message);
    static_cast<void>(push(message->peer, finished));
  }
  post(lock, finished);
}

void ShmMailbox::receive(const ShmMessagePtr& message) {
  owner_.refuse_forked_copy("recv");
  std::unique_lock lock(mutex_);
  Finished finished;
  message->since = Clock::now();
  if (take_stored(*message)) {
    finished.push_back(message);
  } else {
    posted_.push_back(message);
    static_cast<void>(progress(finished));
  }
  post(lock, finished);
}

// The end of posting a message.
void ShmMailbox::post(std::unique_lock<std::mutex>& lock, Finished& finished) {
  if (closed_) fail_all({ShmFault::kClosed, segment_->rank()}, finished);
  if (!idle()) {
    if (!background_.joinable())
      background_ = std::thread([self = shared_from_this()] { self->run_background(); });
    if (dozing_) attention_.notify_all();
  }
  report(lock, finished);
}

// Calls the callbacks, without the lock: they may post the next message.
void ShmMailbox::report(std::unique_lock<std::mutex>& lock, Finished& finished) {
  if (finished.empty()) return;
  // Another thread may sleep although its message has arrived.
  if (waiting_ > 0) segment_->ring_bell(segment_->rank());
  lock.unlock();
  for (const auto& message : finished) {
    // The callback may hold an owner of the message.
    if (const auto on_done = std::exchange(message->on_done, nullptr)) on_done(*message);
  }
  finished.clear();
  lock.lock();
}

bool ShmMailbox::done(const ShmMessagePtr& message) {
  owner_.refuse_forked_copy("the completion of a message");
  std::unique_lock lock(mutex_);
  Finished finished;
  if (!message->done) static_cast<void>(progress(finished));
  report(lock, finished);
  return message->done;
}

bool ShmMailbox::wait(const ShmMessagePtr& message, Clock::time_point until) {
  owner_.refuse_forked_copy("wait for a message");
  std::unique_lock lock(mutex_);
  ++waiting_;
  auto pauses = segment_->pauses();
  bool in_time = true;
  while (!message->done) {
    const auto seen = segment_->bell();
    Finished finished;
    const bool moved = progress(finished);
    report(lock, finished);
    if (moved || message->done) pauses.came();
    if (message->done) break;
    if (moved) {
      pauses = segment_->pauses();
      continue;
    }
    lock.unlock();
    const bool awake = pauses.next();
    if (!awake) segment_->await_bell(seen, until);
    lock.lock();
    if (awake) continue;
    if (Clock::now() >= until) {
      in_time = message->done;
      break;
    }
    // Bytes that came before the end of their sender count.
    if (!message->done && !progress(finished)) fail_hopeless(finished);
    report(lock, finished);
  }
  --waiting_;
  if (waiting_ == 0 && !idle()) attention_.notify_all();
  return in_time;
}

bool ShmMailbox::idle() const {
  return posted_.empty() &&
         std::all_of(outgoing_.begin(), outgoing_.end(), [](const auto& q) { return q.empty(); }) &&
         std::none_of(inboxes_.begin(), inboxes_.end(), [](const Inbox& i) { return i.target; });
}

void ShmMailbox::run_background() {
  std::unique_lock lock(mutex_);
  int quiet = 0;
  while (!closed_) {
    if (idle() && ++quiet > kTicksBeforeRest) {
      dozing_ = true;
      attention_.wait(lock, [&] { return closed_ || !idle(); });
      dozing_ = false;
      quiet = 0;
    }
    if (idle() || waiting_ > 0) {
      // A waiting thread moves all messages, and notifies this one if it returns before the last.
      attention_.wait_for(lock, idle() ? kTick : kTicksBeforeRest * kTick);
      continue;
    }
    quiet = 0;
    const auto seen = segment_->bell();
    Finished finished;
    if (!progress(finished)) {
      fail_hopeless(finished);
      if (finished.empty()) {
        lock.unlock();
        segment_->await_bell(seen, Clock::time_point::max());
        lock.lock();
      }
    }
    report(lock, finished);
  }
}

bool ShmMailbox::progress(Finished& finished) {
  bool moved = false;
  for (int rank = 0; rank < segment_->size(); ++rank) {
    moved |= push(rank, finished);
    moved |= pull(rank, finished);
  }
  return moved;
}

bool ShmMailbox::push(int to, Finished& finished) {
  auto& queue = outgoing_[to];
  const int own = segment_->rank();
  bool moved = false;
  while (!queue.empty()) {
    auto& message = *queue.front();
    if (!message.frame_sent) {
      const Frame frame{message.tag, message.type, message.bytes};
      if (room(*segment_, own, to) < sizeof frame) break;
      static_cast<void>(
          put(*segment_, own, to, reinterpret_cast<const std::byte*>(&frame), sizeof frame));
      message.frame_sent = moved = true;
    }
    const auto n =
        put(*segment_, own, to, message.data + message.moved, message.bytes - message.moved);
    message.moved += n;
    moved |= n > 0;
    if (message.moved < message.bytes) break;
    message.done = true;
    finished.push_back(queue.front());
    queue.pop_front();
  }
  if (moved) segment_->ring_bell(to);
  return moved;
}

bool ShmMailbox::wanted(int from) const {
  return std::any_of(posted_.begin(), posted_.end(), [&](const ShmMessagePtr& message) {
    return message->peer == from || message->peer < 0;
  });
}

bool ShmMailbox::pull(int from, Finished& finished) {
  auto& inbox = inboxes_[from];
  const int own = segment_->rank();
  bool moved = false;
  while (inbox.target || inbox.dropped || wanted(from)) {
    if (!inbox.in_frame) {
      if (available(*segment_, from, own) < sizeof inbox.frame) break;
      static_cast<void>(take(*segment_, from, own, reinterpret_cast<std::byte*>(&inbox.frame),
                             sizeof inbox.frame));
      begin_frame(from);
      moved = true;
    }
    std::byte* to = nullptr;
    if (inbox.target && inbox.target->problem.empty()) {
      to = inbox.target->data + inbox.arrived;
    } else if (!inbox.target && !inbox.dropped) {
      to = inbox.aside.data() + inbox.arrived;
    }
    const auto n = take(*segment_, from, own, to, inbox.frame.bytes - inbox.arrived);
    inbox.arrived += n;
    moved |= n > 0;
    if (inbox.arrived < inbox.frame.bytes) break;
    end_frame(from, finished);
  }
  if (moved) segment_->ring_bell(from);
  return moved;
}

namespace {

std::string misfit(int from, std::uint64_t bytes, std::uint32_t type, const ShmMessage& message) {
  if (bytes != message.bytes) {
    return str("rank ", from, " sent ", bytes, " bytes with tag ", message.tag,
               ", but the tensor to receive them has ", message.bytes);
  }
  if (type != message.type) {
    return str("rank ", from, " sent a tensor with tag ", message.tag,
               " of another dtype than the one to receive it");
  }
  return {};
}

}  // namespace

void ShmMailbox::begin_frame(int from) {
  auto& inbox = inboxes_[from];
  inbox.in_frame = true;
  inbox.arrived = 0;
  inbox.target = take_posted(from, inbox.frame);
  if (!inbox.target) {
    inbox.aside.resize(inbox.frame.bytes);
    return;
  }
  inbox.target->source = from;
  inbox.target->problem = misfit(from, inbox.frame.bytes, inbox.frame.type, *inbox.target);
}

void ShmMailbox::end_frame(int from, Finished& finished) {
  auto& inbox = inboxes_[from];
  inbox.in_frame = false;
  if (inbox.dropped) {
    inbox.dropped = false;
    return;
  }
  if (inbox.target) {
    inbox.target->done = true;
    finished.push_back(std::move(inbox.target));
    inbox.target = nullptr;
    return;
  }
  // Its receive may have been posted while it came in.
  Stored stored{inbox.frame, std::move(inbox.aside)};
  inbox.aside = {};
  if (const auto message = take_posted(from, stored.frame)) {
    fill_from(stored, from, *message);
    finished.push_back(message);
  } else {
    inbox.stored.push_back(std::move(stored));
  }
}

ShmMessagePtr ShmMailbox::take_posted(int from, const Frame& frame) {
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const auto& message) {
    return message->tag == frame.tag && (message->peer == from || message->peer < 0);
  });
  if (found == posted_.end()) return nullptr;
  auto message = *found;
  posted_.erase(found);
  return message;
}

void ShmMailbox::fill_from(const Stored& stored, int from, ShmMessage& message) {
  message.source = from;
  message.problem = misfit(from, stored.frame.bytes, stored.frame.type, message);
  if (message.problem.empty() && message.bytes > 0) {
    std::memcpy(message.data, stored.data.data(), message.bytes);
  }
  message.done = true;
}

bool ShmMailbox::take_stored(ShmMessage& message) {
  for (int from = 0; from < segment_->size(); ++from) {
    if (message.peer >= 0 && message.peer != from) continue;
    auto& stored = inboxes_[from].stored;
    const auto found = std::find_if(stored.begin(), stored.end(), [&](const Stored& candidate) {
      return candidate.frame.tag == message.tag;
    });
    if (found == stored.end()) continue;
    fill_from(*found, from, message);
    stored.erase(found);
    return true;
  }
  return false;
}

ShmOutcome ShmMailbox::why_hopeless(const ShmMessage& message) const {
  if (guard_->failed()) return {ShmFault::kVerdict, -1};
  if (const auto told = segment_->reported_fault(); told.fault != ShmFault::kNone) return told;
  if (Clock::now() - message.since >= message.timeout) return {ShmFault::kLate, message.peer};
  if (message.peer >= 0) return {segment_->state_of(message.peer), message.peer};
  ShmOutcome gone;
  for (int rank = 0; rank < segment_->size(); ++rank) {
    if (rank == segment_->rank()) continue;
    gone = {segment_->state_of(rank), rank};
    if (gone.fault == ShmFault::kNone) return {};
  }
  return gone;
}

void ShmMailbox::fail_hopeless(Finished& finished) {
  const auto hopeless = [&](const ShmMessagePtr& message) {
    const auto outcome = why_hopeless(*message);
    if (outcome.fault == ShmFault::kNone) return false;
    // Half a message may be in the ring, so that those behind it cannot be told apart.
    message->outcome = outcome.fault == ShmFault::kLate ? segment_->report_fault(outcome) : outcome;
    message->done = true;
    finished.push_back(message);
    return true;
  };
  for (auto& queue : outgoing_) std::erase_if(queue, hopeless);
  std::erase_if(posted_, hopeless);
  for (auto& inbox : inboxes_) {
    if (!inbox.target || !hopeless(inbox.target)) continue;
    inbox.target = nullptr;
    inbox.dropped = true;
  }
}

void ShmMailbox::fail_all(ShmOutcome outcome, Finished& finished) noexcept {
  const auto fail = [&](const ShmMessagePtr& message) {
    message->outcome = outcome;
    message->done = true;
    finished.push_back(message);
  };
  for (auto& queue : outgoing_) {
    std::for_each(queue.begin(), queue.end(), fail);
    queue.clear();
  }
  std::for_each(posted_.begin(), posted_.end(), fail);
  posted_.clear();
  for (auto& inbox : inboxes_) {
    if (!inbox.target) continue;
    fail(inbox.target);
    inbox.target = nullptr;
    inbox.dropped = true;
  }
}

}  // namespace accelerate::detail::comm
