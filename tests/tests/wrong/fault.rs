//! The faults. A law must reject each.

use super::maps::WrongMap;

/// A fault of a sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No fault; all laws must pass.
    None,
    /// Another map from words to exponentials.
    Map(WrongMap),
    /// Noise by the token's index in the shard.
    LocalNoise,
    /// Granules by the token's index in the shard.
    LocalGranules,
    /// Skips a granule whose leader cannot be drawn.
    GranuleOfItsLeader,
    /// Noise by the row's index in the batch.
    RowNoise,
    /// Noise that advances with every call.
    CallNoise,
    /// Uses only the low 32 bits of the seed.
    SeedTruncated,
    /// Uses only the low 32 bits of the position.
    PositionTruncated,
    /// Uses the same noise for two draws.
    DrawHalved,
    /// Counts draws from 0 in every call.
    FirstDrawIgnored,
    /// Rounds scores to bf16.
    Bf16Maxima,
    /// Rounds logits to bf16.
    Bf16Logits,
    /// Sums masses over bf16 logits.
    Bf16Mass,
    /// Float32 sums whose order depends on the number of rows.
    SumsByBatch,
    /// Float32 sums in a canonical plan.
    NotCanonical,
    /// Ignores the last element of an odd hidden size.
    OddHidden,
    /// Ignores the last of several tiles.
    DroppedTile,
    /// Skips all further tokens when the best score is less than 1e-4 above the largest logit.
    SkipsTooMuch,
    /// Computes a token's threshold for the first token's score, and shifts it to the best score.
    StaleThreshold,
    /// Returns the higher token of equal scores.
    HigherTie,
    /// The binary merge uses the coin of the next group.
    NextCoin,
    /// The binary merge compares with a running mass that already includes the new group.
    RunningMassTooEarly,
    /// The binary merge uses one coin for all groups.
    OneCoin,
    /// Selects the group by its maximum, but claims a selection by its mass.
    ReuseCalledFresh,
    /// After the first token, a list has the largest logits.
    GreedyList,
    /// A list has independent draws.
    ListOfDraws,
    /// Reads mask words from the most significant bit.
    MaskBitOrder,
    /// Ignores the bias of the last token.
    BiasTooShort,
    /// Adds the bias after the temperature.
    BiasAfterTemperature,
    /// Divides logit plus noise by the temperature.
    TemperatureOnScores,
    /// Draws from padding.
    PaddingDrawn,
    /// A NaN counts as -inf.
    NanIgnored,
    /// Accepts filters and ignores them.
    FiltersDropped,
    /// Drops the last token that a filter keeps.
    TopPWithoutBoundary,
    /// Keeps the higher tokens of equal logits at rank k.
    HigherKth,
    /// Uses an epsilon that is one float lower.
    LowerEpsilon,
    /// Top-n-sigma uses the deviation of logits on a grid of 2^-12 nat.
    CoarseDeviation,
    /// Ignores a min-p below e^-8 beside a top-k.
    SmallMinPLost,
    /// Orders the largest log-probabilities by the logits before the filters.
    TopBeforeTemperature,
    /// Applies filters before the temperature in every order.
    FilterBeforeTemperature,
    /// Applies penalties after the temperature.
    PenaltiesAfterTemperature,
    /// Divides negative logits by the repetition penalty.
    RepetitionDivides,
    /// XTC ignores its coin and always excludes the top choices.
    XtcAlways,
    /// A history without penalties lowers the logits of its tokens.
    PenaltyOfOne,
    /// Raw log-probabilities use the processed logits.
    ProcessedCalledRaw,
    /// Ranks count other tokens with the drawn token's logit as before it.
    RankBehindTies,
    /// Returns the logit of the token after a given token.
    NextTokensLogit,
    /// Uses the bans of the neighbouring row.
    NeighboursBans,
    /// Accepts any number of row parameters.
    RowCountIgnored,
}
