// The one translation unit that sees Gloo's headers.
//
// The LibTorch wheel contains Gloo but not its headers; Debian's libgloo-dev lends them. Only
// c10d's own class is used, and nothing of Gloo is linked.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "accelerate/environment.h"
#include "core/text.h"
#include "state/process_group.h"

namespace accelerate::detail {

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                            const GroupOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  auto gloo = Gloo::Options::create(options.timeout);
  if (const auto interfaces = Environment::process().get("GLOO_SOCKET_IFNAME")) {
    for (const auto& name : split(*interfaces, ',')) {
      gloo->devices.push_back(Gloo::createDeviceForInterface(std::string(trim(name))));
    }
  } else if (!options.address.empty()) {
    gloo->devices.push_back(Gloo::createDeviceForHostname(options.address));
  } else {
    gloo->devices.push_back(Gloo::createDefaultDevice());
  }
  // As many threads as Python's: two per device run the collectives of overlapping buckets.
  gloo->threads = static_cast<int>(gloo->devices.size()) * 2;
  return c10::make_intrusive<Gloo>(store, options.rank, options.world_size, gloo);
}

}  // namespace accelerate::detail
