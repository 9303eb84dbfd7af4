// interop_config <in> <out>: reads a config file and writes it again, for config.sh.
#include <iostream>
#include <string>

#include "accelerate/config.h"
#include "accelerate/errors.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: interop_config <in> <out>\n";
    return 2;
  }
  try {
    const auto config = accelerate::load_config_from_file(argv[1]);
    const std::string out = argv[2];
    std::visit(
        [&](const auto& each) {
          out.ends_with(".json") ? each.to_json_file(out) : each.to_yaml_file(out);
        },
        config);
  } catch (const accelerate::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
