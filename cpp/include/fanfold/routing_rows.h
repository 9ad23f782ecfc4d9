// SPDX-License-Identifier: Apache-2.0
#pragma once

// Recorded routing: which experts each token took in each layer, with all that is needed to read
// it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fanfold/dtype.h"
#include "fanfold/export.h"
#include "fanfold/tensor_view.h"

namespace fanfold {

/// What ids count.
enum class IdSpace : std::uint8_t {
  kLogical,   ///< the model's experts
  kPhysical,  ///< their copies under some placement
};

/// "logical", "physical".
FANFOLD_EXPORT const char* name_of(IdSpace id_space) noexcept;

/// How routing is stored: the shape of one token's ids and the type of an id.
struct FANFOLD_EXPORT RoutingSpec {
  int num_layers = 0;
  int num_experts = 0;
  int top_k = 0;
  DType dtype = DType::kInt16;
  IdSpace id_space = IdSpace::kLogical;

  /// Says "no expert" or "not recorded": -1, or the maximum of an unsigned type. All bits are set.
  std::int64_t sentinel() const noexcept;
  /// Bytes of one token: num_layers * top_k ids.
  std::int64_t row_bytes() const noexcept;
  /// "int8 [tokens, 48, 8] of 128 logical experts", for messages.
  std::string describe() const;
};
FANFOLD_EXPORT bool operator==(const RoutingSpec& a, const RoutingSpec& b) noexcept;
FANFOLD_EXPORT bool operator!=(const RoutingSpec& a, const RoutingSpec& b) noexcept;

/// A spec whose values fit together. Without `dtype` the ids have the narrowest signed type that
/// holds every id and -1. int8, int16, int32, uint8 or uint16 must hold every id and its sentinel:
/// uint8 does for up to 255 experts.
/// @throws InvalidArgument  a value below 1, or a type that is too narrow or none of these.
FANFOLD_EXPORT RoutingSpec make_routing_spec(int num_layers, int num_experts, int top_k,
                                             std::optional<DType> dtype = {},
                                             IdSpace id_space = IdSpace::kLogical);

/// Routing of consecutive tokens, in memory of its own.
struct FANFOLD_EXPORT RoutingRows {
  RoutingSpec spec;
  std::int64_t first_position = 0;  ///< of the first token in its request
  std::int64_t num_tokens = 0;
  std::vector<std::byte> data;  ///< [num_tokens, num_layers, top_k], dense

  /// View of `data`; valid while the rows are neither changed nor destroyed.
  TensorView array() const;
};

/// Copies `array` [tokens, num_layers, top_k] of the spec's dtype; each token's ids are dense.
/// @throws InvalidArgument  another shape, dtype or device, or a negative position.
FANFOLD_EXPORT RoutingRows copy_rows(const RoutingSpec& spec, const TensorView& array,
                                     std::int64_t first_position = 0);

/// Checks sizes, and that every id is an expert or the sentinel. The functions below check sizes.
/// @throws InvalidArgument  naming token, layer and column of the first id that is neither.
FANFOLD_EXPORT void check_rows(const RoutingRows& rows);

/// The same ids in another type; sentinels stay sentinels.
/// @throws InvalidArgument  the type cannot hold them.
FANFOLD_EXPORT RoutingRows astype(const RoutingRows& rows, DType dtype);

/// The tokens at positions [first, last): what a context-parallel rank keeps, or what is left when
/// a known prefix is omitted.
/// @throws InvalidArgument  a position that the rows do not have.
FANFOLD_EXPORT RoutingRows slice_tokens(const RoutingRows& rows, std::int64_t first,
                                        std::int64_t last);
/// The layers [first, last), counted within these rows: what a pipeline stage keeps.
/// @throws InvalidArgument  no such layers.
FANFOLD_EXPORT RoutingRows slice_layers(const RoutingRows& rows, int first, int last);
/// Joins parts that follow each other: a known prefix and the rest, prefill and decode.
/// @throws InvalidArgument  none, other specs, or a part that does not begin where the one before
///         ends.
FANFOLD_EXPORT RoutingRows concat_tokens(const std::vector<RoutingRows>& parts);
/// Joins the layers of pipeline stages, in their order.
/// @throws InvalidArgument  none, or parts that differ in more than the number of layers.
FANFOLD_EXPORT RoutingRows concat_layers(const std::vector<RoutingRows>& parts);

/// How many tokens chose each expert: [num_layers * num_experts], layer by layer. Sentinels do not
/// count.
FANFOLD_EXPORT std::vector<std::int64_t> expert_histogram(const RoutingRows& rows);

/// Tokens that went through the model: the last generated one did not.
/// @throws InvalidArgument  a negative number.
FANFOLD_EXPORT std::int64_t num_tokens_fed(std::int64_t num_prompt, std::int64_t num_generated);
/// Checks that `rows` are those of a whole request.
/// @throws InvalidArgument  they do not begin at 0 or are not `num_tokens_fed` many.
FANFOLD_EXPORT void check_num_tokens(const RoutingRows& rows, std::int64_t num_prompt,
                                     std::int64_t num_generated);

/// Rows of each shard when `num_tokens` are cut into `num_shards` shards of
/// ceil(num_tokens / num_shards): the last ones have fewer, or none, as `shard_of` gives them.
/// Where shards are padded to equal size, each has as many as the first.
/// @throws InvalidArgument  a negative number of tokens, or no shard.
FANFOLD_EXPORT std::vector<std::int64_t> shard_counts(std::int64_t num_tokens, int num_shards);
/// The rows of one such shard, a view without its padding; may be empty.
/// @throws InvalidArgument  no such shard, or a tensor without rows.
FANFOLD_EXPORT TensorView shard_of(const TensorView& rows, int num_shards, int shard);
/// Writes the shards one after the other to `out` until it is full; what is left is padding.
/// @throws InvalidArgument  shards that differ from `out` in dtype or row, that have fewer rows
/// than
///         it, or of which as many rows as there are shards, or more, would be padding.
FANFOLD_EXPORT void join_shards(const std::vector<TensorView>& shards, const TensorView& out);

}  // namespace fanfold
