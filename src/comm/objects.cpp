// Objects between processes: one message of a fixed size, and a second one if some do not fit in
// it.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "comm/peers.h"
#include "core/exception_text.h"
#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

/// Every process has a slot of this size in the first message: a header and the first bytes. Most
/// objects fit, and an all-gather of 4 KiB takes no longer than one of 8 bytes.
constexpr std::size_t kSlotBytes = 4096;

/// The start of each slot.
struct Header {
  std::uint64_t length = 0;
  std::uint64_t count = 0;
};
constexpr std::size_t kInlineBytes = kSlotBytes - sizeof(Header);

/// A length beyond this is not an object but a broken message.
constexpr std::uint64_t kMaxObjectBytes = std::uint64_t{1} << 33;

/// Instead of a length: the object could not be written, and the slot holds the reason.
constexpr std::uint64_t kRefused = ~std::uint64_t{0};

/// The object of this process, or the error that prevented it.
struct Written {
  std::string bytes = {};  // the text of the error if there is one
  std::exception_ptr error = nullptr;
};

/// Never throws: the others wait for the first message.
Written written(const Encode& encode) {
  try {
    return {encode()};
  } catch (...) {
    auto [type, message, stack] = current_exception_text();
    return {message.empty() ? std::move(type) : std::move(message), std::current_exception()};
  }
}

std::string_view rest_of(std::string_view bytes) {
  return bytes.substr(std::min(bytes.size(), kInlineBytes));
}

at::Tensor message(std::size_t size) {
  return at::zeros({static_cast<std::int64_t>(size)}, at::kByte);
}

/// Collective. Gathers `in`, a CPU tensor of the same number of bytes on every process.
at::Tensor all_gather(const Peers& peers, const at::Tensor& in) {
  const auto device = peers.message_device();
  const auto sent = in.to(device);
  auto out = at::empty({peers.size() * in.numel()}, sent.options());
  peers.all_gather(out, sent);
  return out.to(at::kCPU).view({peers.size(), -1});
}

struct Slots {
  std::vector<Header> headers = {};
  std::vector<std::string> bytes = {};  // the first part of each object
};

/// Throws the error of this process, or `CommError` with that of another.
void refuse_unwritten(const Peers& peers, const Written& mine, const Slots& slots) {
  if (mine.error) std::rethrow_exception(mine.error);
  for (std::size_t rank = 0; rank < slots.headers.size(); ++rank) {
    if (slots.headers[rank].length != kRefused) continue;
    const auto& text = slots.bytes[rank];
    throw CommError(str(peers.call_site(), ": rank ", rank,
                        " failed: ", std::string_view(text).substr(0, text.find('\0'))),
                    static_cast<int>(rank));
  }
}

Slots exchange_slots(const Peers& peers, const Written& object, std::size_t count) {
  const std::string_view bytes = object.bytes;
  auto slot = message(kSlotBytes);
  auto* data = slot.mutable_data_ptr<std::uint8_t>();
  const Header mine{object.error ? kRefused : bytes.size(), count};
  std::memcpy(data, &mine, sizeof mine);
  std::memcpy(data + sizeof mine, bytes.data(), std::min(bytes.size(), kInlineBytes));
  const auto all = all_gather(peers, slot);
  Slots slots;
  for (int rank = 0; rank < peers.size(); ++rank) {
    const auto* from =
        all.const_data_ptr<std::uint8_t>() + static_cast<std::size_t>(rank) * kSlotBytes;
    Header header;
    std::memcpy(&header, from, sizeof header);
    if (header.length > kMaxObjectBytes && header.length != kRefused) {
      throw CommError(str(peers.call_site(), ": rank ", rank, " announces an object of ",
                          header.length, " bytes; at most ", kMaxObjectBytes, " can be sent."),
                      rank);
    }
    slots.headers.push_back(header);
    slots.bytes.emplace_back(reinterpret_cast<const char*>(from + sizeof header),
                             std::min<std::size_t>(header.length, kInlineBytes));
  }
  refuse_unwritten(peers, object, slots);
  return slots;
}

}  // namespace

GroupPlace ObjectMessages::place_in(const GroupHandle* group) {
  const Peers peers("exchange", {group, {}});
  return {.rank = peers.rank(), .size = peers.size()};
}

std::vector<std::string> ObjectMessages::exchange(const Encode& encode, const GroupHandle* group,
                                                  const char* operation,
                                                  std::source_location where) {
  const Peers peers(operation, {group, where});
  const auto object = written(encode);
  auto slots = exchange_slots(peers, object, 0);
  std::size_t longest = 0;
  for (const auto& header : slots.headers) {
    if (header.length > kInlineBytes) longest = std::max(longest, header.length - kInlineBytes);
  }
  if (longest == 0) return std::move(slots.bytes);

  auto more = message(longest);
  const auto rest = rest_of(object.bytes);
  std::memcpy(more.mutable_data_ptr<std::uint8_t>(), rest.data(), rest.size());
  const auto all = all_gather(peers, more);
  for (std::size_t rank = 0; rank < slots.bytes.size(); ++rank) {
    const auto length = slots.headers[rank].length;
    if (length <= kInlineBytes) continue;
    slots.bytes[rank].append(
        reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>()) + rank * longest,
        length - kInlineBytes);
  }
  return std::move(slots.bytes);
}

std::string ObjectMessages::broadcast(const Encode& encode, std::size_t count, int from_process,
                                      const GroupHandle* group, std::source_location where) {
  const Peers peers("broadcast_object_list", {group, where});
  peers.check_rank(from_process, "from_process");
  const bool sends = peers.rank() == from_process;
  const auto object = sends ? written(encode) : Written{};
  auto slots = exchange_slots(peers, object, count);
  const auto root = static_cast<std::size_t>(from_process);
  const auto differs = [&](const Header& header) {
    return header.count != slots.headers[root].count;
  };
  if (std::any_of(slots.headers.begin(), slots.headers.end(), differs)) {
    std::string lines;
    for (std::size_t rank = 0; rank < slots.headers.size(); ++rank) {
      lines += str("\n  - Process ", rank, ": ", slots.headers[rank].count);
    }
    throw ArgumentError(str(peers.call_site(),
                            ": the lists must be equally long on all processes. "
                            "Their lengths are:",
                            lines));
  }
  const auto length = slots.headers[root].length;
  if (length <= kInlineBytes) return std::move(slots.bytes[root]);

  auto more = message(length - kInlineBytes);
  if (sends) {
    const auto rest = rest_of(object.bytes);
    std::memcpy(more.mutable_data_ptr<std::uint8_t>(), rest.data(), rest.size());
  }
  const auto sent = more.to(peers.message_device());
  peers.broadcast(sent, from_process);
  const auto received = sent.to(at::kCPU);
  slots.bytes[root].append(reinterpret_cast<const char*>(received.const_data_ptr<std::uint8_t>()),
                           static_cast<std::size_t>(received.numel()));
  return std::move(slots.bytes[root]);
}

}  // namespace accelerate::detail::comm
