// src/comm/shm_mailbox.h - messages from rank to rank through the rings of a shared segment.
//
// Internal, without Torch. What fits into a ring is sent at once; the rest follows as the receiver
// takes it out. Messages of one sender with one tag arrive in the order they were sent. A message
// without a posted receive stays in the ring until one behind it is needed; then it is stored.
//
// Messages move when a thread posts or waits for one. A background thread moves those for which no
// thread waits.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/guard.h"
#include "comm/shm_segment.h"
#include "core/processes.h"

namespace accelerate::detail::comm {

/// A message to be sent or received. The memory belongs to the caller.
struct ShmMessage {
  /// The receiver, or the sender; -1 for a message of any sender.
  int peer = -1;
  int tag = 0;
  std::byte* data = nullptr;  // only read when it is sent
  std::size_t bytes = 0;
  /// The dtype of the data; must be equal on both sides.
  std::uint32_t type = 0;
  /// How long it may take.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Called once, when `done` is set, on the thread that found out.
  std::function<void(ShmMessage&)> on_done = {};

  bool done = false;
  int source = -1;           ///< the sender of a received message
  ShmOutcome outcome = {};   ///< a peer is gone
  std::string problem = {};  ///< the message is not what was expected
  // How far it is; for the mailbox alone.
  std::size_t moved = 0;
  bool frame_sent = false;
  WaitBudget::Clock::time_point since = {};
};

using ShmMessagePtr = std::shared_ptr<ShmMessage>;

class ShmMailbox : public std::enable_shared_from_this<ShmMailbox> {
 public:
  ShmMailbox(std::shared_ptr<ShmSegment> segment, std::shared_ptr<CallGuard> guard);
  ~ShmMailbox() = default;
  ShmMailbox(const ShmMailbox&) = delete;
  ShmMailbox& operator=(const ShmMailbox&) = delete;

  /// These throw `StateError` in a forked process.
  void send(const ShmMessagePtr& message);
  void receive(const ShmMessagePtr& message);
  /// Returns false if the message is not done by `until`.
  [[nodiscard]] bool wait(const ShmMessagePtr& message, WaitBudget::Clock::time_point until);
  [[nodiscard]] bool done(const ShmMessagePtr& message);
  /// Ends all messages under way with `kClosed`. To be called before the last owner is destroyed.
  void close() noexcept;

 private:
  struct Frame {
    std::int32_t tag;
    std::uint32_t type;
    std::uint64_t bytes;
  };
  // A message that arrived before its receive was posted.
  struct Stored {
    Frame frame;
    std::vector<std::byte> data;
  };
  // The incoming bytes of one rank.
  struct Inbox {
    bool in_frame = false;
    Frame frame{};
    std::size_t arrived = 0;
    ShmMessagePtr target;  // null if the message is stored,
    bool dropped = false;  // or discarded because its receive has failed
    std::vector<std::byte> aside;
    std::deque<Stored> stored;
  };
  using Finished = std::vector<ShmMessagePtr>;

  [[nodiscard]] bool progress(Finished& finished);
  [[nodiscard]] bool push(int to, Finished& finished);
  [[nodiscard]] bool pull(int from, Finished& finished);
  [[nodiscard]] bool wanted(int from) const;
  void begin_frame(int from);
  void end_frame(int from, Finished& finished);
  [[nodiscard]] ShmMessagePtr take_posted(int from, const Frame& frame);
  [[nodiscard]] bool take_stored(ShmMessage& message);
  void fill_from(const Stored& stored, int from, ShmMessage& message);
  void fail_hopeless(Finished& finished);
  [[nodiscard]] ShmOutcome why_hopeless(const ShmMessage& message) const;
  void fail_all(ShmOutcome outcome, Finished& finished) noexcept;
  [[nodiscard]] bool idle() const;
  void post(std::unique_lock<std::mutex>& lock, Finished& finished);
  void report(std::unique_lock<std::mutex>& lock, Finished& finished);
  void run_background();

  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<CallGuard> guard_;
  std::mutex mutex_;
  std::vector<std::deque<ShmMessagePtr>> outgoing_;  // by receiver
  std::vector<bool> prepared_;
  std::vector<Inbox> inboxes_;  // by sender
  std::list<ShmMessagePtr> posted_;
  int waiting_ = 0;
  bool closed_ = false;
  std::condition_variable attention_;
  bool dozing_ = false;
  OwnerProcess owner_;
  std::thread background_;
};

}  // namespace accelerate::detail::comm
