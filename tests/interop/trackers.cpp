// interop_trackers NAME FOLDER: a run of the tracker NAME, logging below FOLDER. Prints the folder,
// file or id of the run.
#include <filesystem>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "accelerate/tracking/summary_writer.h"
#include "tracking/trackers.h"

int main(int argc, char** argv) {
  using namespace accelerate;
  if (argc != 3) {
    std::cerr << "usage: interop_trackers NAME FOLDER\n";
    return 2;
  }
  const std::string name = argv[1];
  const auto tracker = detail::tracking::make_tracker(
      name, {.project_name = "project", .logging_dir = std::filesystem::path(argv[2])});
  tracker->start();
  tracker->store_init_configuration({{"lr", 0.1}, {"layers", 3}, {"deep", true}, {"kind", "tiny"}});
  for (int step = 0; step < 100; ++step) {
    tracker->log({{"loss", 1.0 / (1 + step)}, {"train/acc", step}}, step);
  }
  tracker->log({{"loss", std::numeric_limits<double>::quiet_NaN()}}, 100);
  const bool is_tensorboard = name == "tensorboard";
  if (is_tensorboard || name == "wandb") {
    tracker->log({{"note", "grüß Gott"}, {"both", Value::Dict{{"a", 1}, {"b", 2.5}}}}, 101);
    std::vector<TrackerImage> images;
    for (const char first : {'\0', '\x40'}) {
      images.push_back({.height = 2, .width = 3, .channels = 3});
      for (int i = 0; i < 18; ++i) images.back().pixels += static_cast<char>(first + 3 * i);
    }
    tracker->log_images({{"images", images}}, 102);
  }
  if (name == "wandb") {
    tracker->log_table("table", {.columns = {"x", "y"}, .data = {{1, "a"}, {2.5, nullptr}}}, 103);
    tracker->log({{"large", std::string(100'000, 'x')}}, 104);
  }
  if (is_tensorboard) {
    const std::vector<double> values = {-2, 0, 0.5, 0.5, 3};
    std::any_cast<SummaryWriter*>(tracker->tracker())->add_histogram("values", values, 7);
  }
  tracker->finish();
  const auto handle = tracker->tracker();
  if (const auto* path = std::any_cast<std::filesystem::path>(&handle)) std::cout << path->string();
  if (const auto* id = std::any_cast<std::string>(&handle)) std::cout << *id;
}
