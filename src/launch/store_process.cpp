#include "launch/store_process.h"

#include <unistd.h>

#include <filesystem>

#include "accelerate/environment.h"
#include "core/text.h"

namespace accelerate::detail {
namespace {

std::string find_helper() {
  constexpr const char* kName = "accelerate-torch";
  std::error_code error;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::filesystem::path> folders;
  if (!error) folders.push_back(own.parent_path());
  for (const auto& folder : split(parse_choice_from_env("PATH", ""), ':')) {
    if (!folder.empty()) folders.emplace_back(folder);
  }
  for (const auto& folder : folders) {
    const auto candidate = folder / kName;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate.string();
  }
  return {};
}

}  // namespace

StoreProcess::StoreProcess(const Descriptor& socket) : socket_(socket), program_(find_helper()) {}

void StoreProcess::start() {
  process_ = std::make_unique<ProcessSet>();
  SpawnOptions options;
  options.argv = {program_, "store", "--listen-fd", str(socket_.get())};
  options.inherit = {socket_.get()};
  options.output = StreamTarget::kNull;
  options.no_input = true;
  options.new_session = true;
  process_->spawn(options);
}

}  // namespace accelerate::detail
