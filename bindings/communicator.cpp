// SPDX-License-Identifier: Apache-2.0
#include "fanfold/communicator.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <utility>

#include "bind.h"
#include "convert.h"
#include "device_collectives.h"
#include "transport.h"

namespace fanfold::python {
namespace {

using namespace nanobind::literals;
using Seconds = std::optional<double>;
using Counts = std::vector<std::int64_t>;
using nogil = nb::gil_scoped_release;

constexpr double kDefaultSeconds = 60.0;

Communicator::Bytes to_bytes(const nb::bytes& data) {
  Communicator::Bytes bytes(data.size());
  if (data.size() > 0) std::memcpy(bytes.data(), data.data(), data.size());
  return bytes;
}

nb::list to_list(const std::vector<Communicator::Bytes>& all) {
  nb::list list;
  for (const Communicator::Bytes& bytes : all) list.append(nb::bytes(bytes.data(), bytes.size()));
  return list;
}

Communicator from_callbacks(int rank, int num_ranks, nb::callable all_gather, nb::callable barrier,
                            double timeout_s) {
  // Called on this thread only, and only while this function runs.
  const auto gather = [&](const Communicator::Bytes& bytes) {
    const nb::gil_scoped_acquire gil;
    std::vector<Communicator::Bytes> all;
    for (nb::handle item : all_gather(nb::bytes(bytes.data(), bytes.size()))) {
      all.push_back(to_bytes(nb::cast<nb::bytes>(item)));
    }
    return all;
  };
  const auto wait = [&] {
    const nb::gil_scoped_acquire gil;
    barrier();
  };
  const nogil released;
  return Communicator::from_callbacks(rank, num_ranks, gather, wait, *to_timeout(timeout_s));
}

Communicator from_transport(nb::object transport, const std::string& use, double timeout_s) {
  const TransportUse how = to_transport_use(use);
  const auto timeout = *to_timeout(timeout_s);
  std::shared_ptr<Transport> made = to_transport(std::move(transport));
  const nogil released;
  return Communicator::from_transport(std::move(made), how, timeout);
}

void bind_creation(nb::class_<Communicator>& c) {
  c.def_static(
       "threads",
       [](int num_ranks, double timeout_s) {
         const nogil released;
         return Communicator::threads(num_ranks, *to_timeout(timeout_s));
       },
       "num_ranks"_a, nb::kw_only(), "timeout_s"_a = kDefaultSeconds,
       "The ranks of a new group whose ranks are threads of this process.\n\n"
       "Args:\n    num_ranks: 1 to 1024.\n    timeout_s: default deadline of every call.\n\n"
       "Returns:\n    A list; element r is rank r, for one thread to use.")
      .def_static(
          "processes",
          [](int rank, int num_ranks, const std::string& rendezvous, double timeout_s) {
            const nogil released;
            return Communicator::processes(rank, num_ranks, rendezvous, *to_timeout(timeout_s));
          },
          nb::kw_only(), "rank"_a, "num_ranks"_a, "rendezvous"_a, "timeout_s"_a = kDefaultSeconds,
          "Joins a group of processes of this machine; collective.\n\n"
          "Args:\n    rank: this process, in [0, num_ranks).\n    num_ranks: equal on all ranks.\n"
          "    rendezvous: path for a Unix socket in a directory that only this user can write;\n"
          "        rank 0 creates it, and removes it when all have joined.\n"
          "    timeout_s: deadline for joining and default of every call.\n\n"
          "Raises:\n    InvalidArgument: ranks disagree on num_ranks, or a rank is taken.\n"
          "    PeerTimeout: a rank did not join in time.")
      .def_static(
          "from_env",
          [](double timeout_s) {
            const nogil released;
            return Communicator::from_env(*to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = kDefaultSeconds,
          "`processes` as torchrun's environment names them: RANK, WORLD_SIZE, MASTER_ADDR,\n"
          "MASTER_PORT (only part of a name; no port is opened), TORCHELASTIC_RUN_ID.")
      .def_static("from_callbacks", &from_callbacks, nb::kw_only(), "rank"_a, "num_ranks"_a,
                  "all_gather"_a, "barrier"_a, "timeout_s"_a = kDefaultSeconds,
                  nb::sig("def from_callbacks(*, rank: int, num_ranks: int, all_gather: "
                          "typing.Callable[[bytes], typing.Sequence[bytes]], barrier: "
                          "typing.Callable[[], object], timeout_s: float = 60.0) -> Communicator"),
                  "`processes`, bootstrapped through the caller's own collectives.\n\n"
                  "Args:\n    all_gather: takes bytes, returns every rank's bytes in rank order.\n"
                  "    barrier: returns when every rank has called it.\n"
                  "    Both are called on this thread, and only before this returns.")
      .def_static(
          "from_transport", &from_transport, "transport"_a, nb::kw_only(), "use"_a = "auto",
          "timeout_s"_a = kDefaultSeconds,
          nb::sig("def from_transport(transport: fanfold.transport.Transport, *, use: str "
                  "= 'auto', timeout_s: float = 60.0) -> Communicator"),
          R"doc(Ranks that a transport of yours connects, on one host or on several; collective.

Ranks are on one host if the machine's boot id and the network namespace are the same, or the
environment variable FANFOLD_HOST_ID where one is set.

Args:
    transport: a fanfold.Transport that has not been started.
    use: "auto" takes shared memory if all ranks are on one host and meet there within 5 s, and
        the transport only serves to meet; else the transport carries all data (`kind` and
        `shares_memory` tell). "shared_memory" refuses ranks that are apart.
        "always" uses the transport on one host, too.
    timeout_s: deadline for joining and default of every call.

Raises:
    Unsupported: "shared_memory", and the ranks are on different hosts.
    PeerTimeout: a rank did not join in time.
    BaseException: what a method of the transport raises, here and in every call.)doc")
      .def_static(
          "from_torch",
          [](nb::object group, const std::string& transport, double timeout_s) {
            return nb::module_::import_("fanfold.interop_torch")
                .attr("from_torch")(group, "transport"_a = transport, "timeout_s"_a = timeout_s);
          },
          "group"_a = nb::none(), nb::kw_only(), "transport"_a = "auto",
          "timeout_s"_a = kDefaultSeconds,
          nb::sig("def from_torch(group: object = None, *, transport: str = 'auto', timeout_s: "
                  "float = 60.0) -> Communicator"),
          "The ranks of a torch.distributed group (None: the default one); collective. Through\n"
          "shared memory on one host, else over the group: see fanfold.interop_torch.from_torch.")
      .def_static(
          "from_mpi",
          [](nb::object comm, const std::string& transport, double timeout_s) {
            return nb::module_::import_("fanfold.interop_mpi")
                .attr("from_mpi")(comm, "transport"_a = transport, "timeout_s"_a = timeout_s);
          },
          "comm"_a = nb::none(), nb::kw_only(), "transport"_a = "auto",
          "timeout_s"_a = kDefaultSeconds,
          nb::sig("def from_mpi(comm: object = None, *, transport: str = 'auto', timeout_s: "
                  "float = 60.0) -> Communicator"),
          "The ranks of an mpi4py communicator (None: COMM_WORLD); collective. Through shared\n"
          "memory on one host, else over MPI: see fanfold.interop_mpi.from_mpi.");
}

/// A collective from `send` to `recv`; Extra: the counts that `method` takes beside them.
template <class... Extra, class Method>
auto send_recv(Method method) {
  return [method](Communicator& self, nb::object send, nb::object recv, const Extra&... extra,
                  Seconds timeout_s, nb::object stream) {
    CollectiveArguments args(self);
    const TensorView from = args.view(send, "send");
    const TensorView to = args.output(recv, "recv");
    const std::optional<void*> on = args.stream(stream, recv);
    const nogil released;
    (self.*method)(from, to, extra..., to_timeout(timeout_s), on);
  };
}

void bind_collectives(nb::class_<Communicator>& c) {
  c.def(
       "barrier",
       [](Communicator& self, Seconds timeout_s) {
         const nogil released;
         self.barrier(to_timeout(timeout_s));
       },
       nb::kw_only(), "timeout_s"_a = nb::none(), "Returns when every rank has called it.")
      .def("all_gather_v", send_recv<Counts>(&Communicator::all_gather_v), "send"_a.none(),
           "recv"_a.none(), "counts"_a, nb::kw_only(), "timeout_s"_a = nb::none(),
           "stream"_a = nb::none(),
           "recv [sum(counts), ...] = send [counts[r], ...] of every rank r, in rank order.")
      .def(
          "reduce_scatter_v", send_recv<Counts>(&Communicator::reduce_scatter_v), "send"_a.none(),
          "recv"_a.none(), "counts"_a, nb::kw_only(), "timeout_s"_a = nb::none(),
          "stream"_a = nb::none(),
          "recv [counts[rank], ...] = this rank's rows of the sum of all send [sum(counts), ...].\n"
          "float32, float16, bfloat16, int32 or int64; floats are added in float32, ranks "
          "ascending.")
      .def("all_to_all", send_recv<>(&Communicator::all_to_all), "send"_a.none(), "recv"_a.none(),
           nb::kw_only(), "timeout_s"_a = nb::none(), "stream"_a = nb::none(),
           "Block r of send [num_ranks * n, ...] goes to rank r; recv likewise.")
      .def("all_to_all_v", send_recv<Counts, Counts>(&Communicator::all_to_all_v), "send"_a.none(),
           "recv"_a.none(), "send_counts"_a, "recv_counts"_a, nb::kw_only(),
           "timeout_s"_a = nb::none(), "stream"_a = nb::none(),
           "send_counts[r] rows go to rank r, recv_counts[r] come from it; a difference between "
           "what\n"
           "one rank sends and the other expects is InvalidArgument on every rank.")
      .def(
          "broadcast",
          [](Communicator& self, nb::object tensor, int root, Seconds timeout_s,
             nb::object stream) {
            CollectiveArguments args(self);
            const TensorView view = args.output(tensor, "tensor");
            const std::optional<void*> on = args.stream(stream, tensor);
            const nogil released;
            self.broadcast(view, root, to_timeout(timeout_s), on);
          },
          "tensor"_a.none(), "root"_a, nb::kw_only(), "timeout_s"_a = nb::none(),
          "stream"_a = nb::none(), "Every rank's tensor becomes the root's.")
      .def("all_reduce", send_recv<>(&Communicator::all_reduce), "send"_a.none(), "recv"_a.none(),
           nb::kw_only(), "timeout_s"_a = nb::none(), "stream"_a = nb::none(),
           "recv = sum of all send; may be the same tensor. Types as reduce_scatter_v.")
      .def(
          "all_gather_bytes",
          [](Communicator& self, const nb::bytes& data, Seconds timeout_s) {
            const Communicator::Bytes bytes = to_bytes(data);
            std::vector<Communicator::Bytes> all;
            {
              const nogil released;
              all = self.all_gather_bytes(bytes, to_timeout(timeout_s));
            }
            return to_list(all);
          },
          "data"_a, nb::kw_only(), "timeout_s"_a = nb::none(),
          nb::sig("def all_gather_bytes(self, data: bytes, *, timeout_s: float | None = None) -> "
                  "list[bytes]"),
          "Every rank's bytes in rank order; lengths may differ.");
}

}  // namespace

void bind_communicator(nb::module_& m) {
  nb::class_<Communicator> c(m, "Communicator",
                             "A group of ranks and its collectives.\n\n"
                             "Every rank calls the collectives in the same order; what must match\n"
                             "is compared, and a difference is InvalidArgument on every rank. One\n"
                             "call at a time per object. After PeerTimeout or PeerAborted call\n"
                             "reset() on every rank; after PeerLost the group is broken.");
  bind_creation(c);
  bind_collectives(c);
  bind_nccl(c);
  c.def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("num_ranks", &Communicator::num_ranks)
      .def_prop_ro(
          "kind", &Communicator::kind,
          "\"threads\", \"processes\", \"nccl\", or the kind of the transport: \"gloo\", \"mpi\".")
      .def_prop_ro("hosts", &Communicator::hosts,
                   "The host of each rank: numbers from 0, in the order of their first ranks.")
      .def_prop_ro(
          "shares_memory", &Communicator::shares_memory,
          "Whether every rank reaches the others' memory, which the strategies one_sided,\n"
          "low_latency, high_throughput and two_sided need.")
      .def_prop_ro("is_closed", &Communicator::is_closed)
      .def(
          "split",
          [](Communicator& self, int color, int key, Seconds timeout_s) {
            const nogil released;
            return self.split(color, key, to_timeout(timeout_s));
          },
          "color"_a, "key"_a = 0, nb::kw_only(), "timeout_s"_a = nb::none(),
          "The ranks of equal color form a group, ordered by (key, rank); collective. A negative\n"
          "color joins none and gets None.")
      .def(
          "abort",
          [](Communicator& self, const std::string& reason) {
            const nogil released;
            self.abort(reason);
          },
          "reason"_a, "Makes waits of all ranks here raise PeerAborted until reset(); any thread.")
      .def(
          "reset",
          [](Communicator& self, Seconds timeout_s) {
            const nogil released;
            self.reset(to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = nb::none(),
          "Brings the group back after PeerTimeout or PeerAborted; collective.")
      .def(
          "close",
          [](Communicator& self, Seconds timeout_s) {
            const nogil released;
            self.close(to_timeout(timeout_s));
          },
          nb::kw_only(), "timeout_s"_a = nb::none(),
          "Leaves the group: waits until every rank has closed or has left. Idempotent.")
      .def(
          "__enter__", [](nb::object self) { return self; },
          nb::sig("def __enter__(self) -> Communicator"))
      .def(
          "__exit__",
          [](Communicator& self, nb::args args) {
            const bool failed = !args[0].is_none();
            const nogil released;
            if (!failed) self.close();
          },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

}  // namespace fanfold::python
