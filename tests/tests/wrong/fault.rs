//! The mistakes, each of which a law must reject.

use super::maps::WrongMap;

/// The mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// None: the control of the controls.
    None,
    /// Another map from words to exponentials.
    Map(WrongMap),
    /// Noise by the token's place in the shard.
    LocalNoise,
    /// Granules by the token's place in the shard.
    LocalGranules,
    /// A granule whose leader cannot be drawn is passed over.
    GranuleOfItsLeader,
    /// Noise by the row's place in the batch.
    RowNoise,
    /// Noise that advances with every call.
    CallNoise,
    /// Only the low 32 bits of the seed count.
    SeedTruncated,
    /// Only the low 32 bits of the position count.
    PositionTruncated,
    /// Two draws share their noise.
    DrawHalved,
    /// Draws are counted from the first of the call.
    FirstDrawIgnored,
    /// Scores are kept in bf16.
    Bf16Maxima,
    /// Logits are kept in bf16.
    Bf16Logits,
    /// Masses are summed over bf16 logits.
    Bf16Mass,
    /// Float32 sums whose order depends on the number of rows.
    SumsByBatch,
    /// Float32 sums although the plan is canonical.
    NotCanonical,
    /// An odd hidden size loses its last element.
    OddHidden,
    /// Of several tiles the last is never looked at.
    DroppedTile,
    /// Tokens behind the first are passed over when the best score is less than 1e-4 above the largest logit.
    SkipsTooMuch,
    /// A token's threshold is made for the first token's score, and moved to the best score.
    StaleThreshold,
    /// Of equal scores the higher token wins.
    HigherTie,
    /// The binary merge tosses the coin of the next group.
    NextCoin,
    /// The binary merge compares with a running mass that holds the new group already.
    RunningMassTooEarly,
    /// The binary merge tosses one coin for all groups.
    OneCoin,
    /// The group is chosen by its maximum, but said to be chosen by its mass.
    ReuseCalledFresh,
    /// After the first token, a list takes the largest logits.
    GreedyList,
    /// A list takes each token by a draw of its own.
    ListOfDraws,
    /// The most significant bit of a mask word comes first.
    MaskBitOrder,
    /// The bias of the last token is lost.
    BiasTooShort,
    /// The bias is added after the temperature.
    BiasAfterTemperature,
    /// The temperature divides logit plus noise.
    TemperatureOnScores,
    /// Padding takes part.
    PaddingDrawn,
    /// A NaN counts as -inf.
    NanIgnored,
    /// Filters are accepted and dropped.
    FiltersDropped,
    /// The last token that a filter keeps is dropped.
    TopPWithoutBoundary,
    /// Of equal logits at the k-th place the higher tokens are kept.
    HigherKth,
    /// The limit of epsilon is one float lower.
    LowerEpsilon,
    /// Top-n-sigma goes by the deviation of logits on a grid of 2^-12 nat.
    CoarseDeviation,
    /// A min-p below e^-8 is lost where there is a top-k.
    SmallMinPLost,
    /// The largest log-probabilities are in the order of the logits that the filters see.
    TopBeforeTemperature,
    /// Filters see the logits before the temperature, whatever the order.
    FilterBeforeTemperature,
    /// Penalties act after the temperature.
    PenaltiesAfterTemperature,
    /// The repetition penalty divides negative logits too.
    RepetitionDivides,
    /// Top choices are excluded whatever the coin says.
    XtcAlways,
    /// A history alone lowers the logits of its tokens.
    PenaltyOfOne,
    /// Raw log-probabilities are of the logits that are drawn from.
    ProcessedCalledRaw,
    /// Ranks count the other tokens with the drawn token's logit.
    RankBehindTies,
    /// The logit of a given token is the next token's.
    NextTokensLogit,
    /// A row's bans are those of its neighbour.
    NeighboursBans,
    /// Any number of row parameters goes.
    RowCountIgnored,
}
