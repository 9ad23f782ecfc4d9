// SPDX-License-Identifier: Apache-2.0
#include "fanfold/build_info.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <map>
#include <string>

#include "bind.h"
#include "simulator.h"

NB_MODULE(_core, m) {
  m.doc() = "Native part of fanfold.";
  fanfold::python::bind_errors(m);
  fanfold::python::bind_communicator(m);
  fanfold::python::bind_gpu_memory(m);
  fanfold::python::bind_allocator(m);
  fanfold::python::bind_memory_pool(m);
  fanfold::python::bind_received(m);
  fanfold::python::bind_records(m);
  fanfold::python::bind_all_to_all(m);
  fanfold::python::bind_capture(m);
  fanfold::python::bind_simulator(m);
  m.def(
      "build_info",
      [] {
        const fanfold::BuildInfo& info = fanfold::build_info();
        return std::map<std::string, std::string>{{"version", info.version},
                                                  {"build_type", info.build_type},
                                                  {"compiler", info.compiler},
                                                  {"cuda", info.cuda},
                                                  {"cuda_architectures", info.cuda_architectures}};
      },
      "How the library was built: version, build_type, compiler, cuda, cuda_architectures.");
}
