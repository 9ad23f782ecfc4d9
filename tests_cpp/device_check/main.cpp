// SPDX-License-Identifier: Apache-2.0

// device_check COMMAND [NAME=VALUE]...: what tools/device_check.sh runs on a machine with a GPU.
// The same program runs on the simulated device in every test run.

#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "device_check/commands.h"
#include "device_check/platform.h"

namespace fanfold::device_check {
namespace {

constexpr const char* kUsage =
    "Usage: device_check probe|rounds|bench|nccl [NAME=VALUE]...\n"
    "  ranks tokens hidden top_k experts rounds timeout_ms seed: numbers\n"
    "  layout: rank_major or expert_major     graph: 0 or 1     library: NCCL's file\n";

Options parse(int count, char** arguments) {
  Options options;
  const std::map<std::string, std::function<void(const std::string&)>> setters = {
      {"ranks", [&](const std::string& text) { options.ranks = std::stoi(text); }},
      {"tokens", [&](const std::string& text) { options.tokens = std::stoi(text); }},
      {"hidden", [&](const std::string& text) { options.hidden = std::stoi(text); }},
      {"top_k", [&](const std::string& text) { options.top_k = std::stoi(text); }},
      {"experts", [&](const std::string& text) { options.experts = std::stoi(text); }},
      {"rounds", [&](const std::string& text) { options.rounds = std::stoi(text); }},
      {"timeout_ms", [&](const std::string& text) { options.timeout_ms = std::stoi(text); }},
      {"seed", [&](const std::string& text) { options.seed = std::stoull(text); }},
      {"layout", [&](const std::string& text) { options.layout = layout_from_name(text); }},
      {"library", [&](const std::string& text) { options.library = text; }},
      {"graph", [&](const std::string& text) { options.graph = std::stoi(text) != 0; }},
  };
  for (int i = 0; i < count; ++i) {
    const std::string argument = arguments[i];
    const std::size_t equals = argument.find('=');
    const auto setter = setters.find(argument.substr(0, equals));
    if (equals == std::string::npos || setter == setters.end()) {
      throw std::invalid_argument("device_check: got '" + argument + "'\n" + kUsage);
    }
    setter->second(argument.substr(equals + 1));
  }
  return options;
}

int run(int count, char** arguments) {
  const std::map<std::string, bool (*)(const Options&)> commands = {
      {"probe", &probe}, {"rounds", &rounds}, {"bench", &bench}, {"nccl", &nccl}};
  const auto command = commands.find(count > 1 ? arguments[1] : "");
  if (command == commands.end()) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  const Options options = parse(count - 2, arguments + 2);
  begin(options);
  const bool is_well = command->second(options);
  return end() && is_well ? 0 : 1;
}

}  // namespace
}  // namespace fanfold::device_check

int main(int count, char** arguments) {
  try {
    return fanfold::device_check::run(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
