// How the ranks of a group find the shared segment, or agree that there will be none.
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/shm_backend.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kOffer = "shm/offer";      // where the segment is, by rank 0
constexpr const char* kVerdict = "shm/verdict";  // what all ranks do; written once, by anybody
constexpr const char* kYes = "yes";
const std::string kNone = "none: ";

std::string answer_of(int rank) { return str("shm/answer/", rank); }

class Meeting {
 public:
  Meeting(c10d::Store& store, int rank, int size, const ShmOptions& options)
      : store_(store), rank_(rank), size_(size), options_(options) {}

  [[nodiscard]] std::unique_ptr<ShmSegment> hold(std::string& why_not) {
    auto segment = rank_ == 0 ? invite(why_not) : follow(why_not);
    const auto verdict = rank_ == 0 ? judge(why_not) : await_verdict(why_not);
    if (verdict == kYes && segment) return segment;
    why_not = verdict;
    return nullptr;
  }

 private:
  // Returns false if the key is not set by then.
  [[nodiscard]] bool await(const std::string& key, std::chrono::milliseconds limit) {
    try {
      store_.wait({key}, std::max(limit, std::chrono::milliseconds(1)));
      return true;
    } catch (const std::exception&) {
      return store_.check({key});
    }
  }

  // What was decided, which is this unless another rank was first.
  [[nodiscard]] std::string decide(const std::string& verdict) {
    return store_.compareSet(kVerdict, "", verdict);
  }

  [[nodiscard]] std::unique_ptr<ShmSegment> invite(std::string& why_not) {
    auto segment = ShmSegment::make(size_, options_, why_not);
    store_.set(kOffer, segment ? segment->address() : kNone + why_not);
    return segment;
  }

  [[nodiscard]] std::unique_ptr<ShmSegment> follow(std::string& why_not) {
    if (!await(kOffer, options_.meeting_timeout)) {
      why_not = str("rank 0 did not come within ", options_.meeting_timeout.count(), " ms");
      return nullptr;
    }
    const auto address = store_.get_to_str(kOffer);
    std::unique_ptr<ShmSegment> segment;
    if (address.starts_with(kNone)) {
      why_not = address.substr(kNone.size());
    } else {
      segment = ShmSegment::open(address, rank_, size_, options_, why_not);
    }
    store_.set(answer_of(rank_), segment ? std::string(kYes) : why_not);
    return segment;
  }

  [[nodiscard]] std::string judge(const std::string& why_not) {
    if (!why_not.empty()) return decide(why_not);
    const auto end = Clock::now() + options_.meeting_timeout;
    for (int rank = 1; rank < size_; ++rank) {
      if (store_.check({kVerdict})) break;  // another rank has given up
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      if (!await(answer_of(rank), left)) {
        return decide(
            str("rank ", rank, " did not come within ", options_.meeting_timeout.count(), " ms"));
      }
      const auto answer = store_.get_to_str(answer_of(rank));
      if (answer != kYes) return decide(answer);
    }
    return decide(kYes);
  }

  [[nodiscard]] std::string await_verdict(const std::string& why_not) {
    if (!why_not.empty()) return decide(why_not);
    // Rank 0 waits for the others itself.
    if (!await(kVerdict, 2 * options_.meeting_timeout)) {
      return decide(
          str("rank 0 said nothing within ", 2 * options_.meeting_timeout.count(), " ms"));
    }
    return store_.get_to_str(kVerdict);
  }

  c10d::Store& store_;
  int rank_;
  int size_;
  const ShmOptions& options_;
};

}  // namespace

c10::intrusive_ptr<ShmBackend> ShmBackend::try_make(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size, const ShmOptions& options,
                                                    std::shared_ptr<CallGuard> guard,
                                                    std::string& why_not) {
  why_not.clear();
  if (size > ShmSegment::kMaxRanks) {
    why_not =
        str("there are ", size, " ranks, and shared memory serves at most ", ShmSegment::kMaxRanks);
    return nullptr;
  }
  auto segment = Meeting(*store, rank, size, options).hold(why_not);
  if (!segment) return nullptr;
  why_not.clear();
  segment->watch_peers();
  return c10::make_intrusive<ShmBackend>(std::move(segment), std::move(guard), options);
}

}  // namespace accelerate::detail::comm
