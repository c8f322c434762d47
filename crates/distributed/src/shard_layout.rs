//! The handshake: what each shard reports, and the check that the shards form one vocabulary.

use crate::codec::wire::{Reader, Wire, WireError, wire_enum, wire_struct};
use crate::error::{ShardError, unlike};
use crate::merge::ShardMerge;
use crate::options::{ShardOptions, Transforms};
use core::ops::Range;
use flash_sampling_core::{
    Capabilities, DType, Description, Exactness, Input, Knob, Knobs, PerturbedArgmax, Plan, Shape, Variant,
};

/// First bytes of a description; the last two digits are the version of the format.
const MAGIC: u32 = u32::from_le_bytes(*b"FS09");

/// The report of a shard in the handshake.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ShardInfo {
    pub(crate) tokens: Range<u32>,
    pub(crate) vocab_size: u32,
    pub(crate) input: usize,
    pub(crate) plan: Plan,
    pub(crate) merge: ShardMerge,
    weight: Option<DType>,
    transforms: Option<Transforms>,
    /// Its own rank.
    rank: usize,
    /// The number of ranks in its report.
    world: usize,
    takes_hidden: bool,
    pathwise: bool,
    /// Whether it draws among inner shards, with the noise of shards.
    draws_shards: bool,
    without_replacement: bool,
    /// Whether it supports all of [`Knobs::ADJUSTMENTS`].
    adjusts: bool,
    /// Whether it has a [`Scan`](flash_sampling_core::backend::Scan), for rows with filters or raw log-probabilities.
    scans: bool,
    canonical: bool,
}

wire_enum!(ShardMerge, "an unknown merge" { 0 = Winners, 1 = LogMass });
wire_struct!(Transforms { bias, soft_cap, scale });
wire_struct!(ShardInfo {
    tokens,
    vocab_size,
    input,
    plan,
    merge,
    weight,
    transforms,
    rank,
    world,
    takes_hidden,
    pathwise,
    draws_shards,
    without_replacement,
    adjusts,
    scans,
    canonical,
});

impl ShardInfo {
    /// The report of a sampler that is shard number `rank` of `world`.
    pub(crate) fn of(sampler: &mut dyn PerturbedArgmax, options: &ShardOptions, rank: usize, world: usize) -> Self {
        let (shape, can) = (sampler.shape(), sampler.capabilities());
        ShardInfo {
            tokens: shape.tokens,
            vocab_size: shape.vocab_size,
            input: shape.input,
            plan: sampler.plan(),
            merge: options.merge,
            weight: options.weight,
            transforms: options.transforms,
            rank,
            world,
            takes_hidden: can.input == Input::Hidden,
            pathwise: can.exactness == Exactness::Pathwise,
            draws_shards: can.variant == Variant::Sharded && can.exactness == Exactness::InDistribution,
            without_replacement: can.without_replacement,
            adjusts: can.knobs.intersection(Knobs::ADJUSTMENTS) == Knobs::ADJUSTMENTS,
            scans: sampler.scan().is_some(),
            canonical: can.canonical,
        }
    }

    pub(crate) fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.clear();
        MAGIC.put(bytes);
        self.put(bytes);
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(bytes);
        match u32::take(&mut reader)? {
            MAGIC => {}
            magic if magic as u16 == MAGIC as u16 => return Err(reader.invalid("the description of another version")),
            _ => return Err(reader.invalid("not a shard's description")),
        }
        let info = ShardInfo::take(&mut reader)?;
        reader.finish().map(|()| info)
    }

    /// Checks that this shard has number `shard` of `world`, can be merged, and agrees with the first.
    fn check_against(&self, first: &ShardInfo, shard: usize, world: usize) -> Result<(), ShardError> {
        if (self.rank, self.world) != (shard, world) {
            return Err(ShardError::Rank { shard, world, found_rank: self.rank, found_world: self.world });
        }
        if !self.takes_hidden {
            return Err(ShardError::Input { shard });
        }
        for (what, found, expected) in [
            ("merge", self.merge.to_string(), first.merge.to_string()),
            ("vocabulary size", self.vocab_size.to_string(), first.vocab_size.to_string()),
            ("hidden size", self.input.to_string(), first.input.to_string()),
            ("a plan with", unlike(&self.plan, &first.plan), unlike(&first.plan, &self.plan)),
        ] {
            if found != expected {
                return Err(ShardError::Mismatch { shard, other: 0, what, expected, found });
            }
        }
        if self.merge == ShardMerge::Winners && !self.pathwise {
            return Err(ShardError::NotPathwise { shard });
        }
        if self.draws_shards {
            return Err(ShardError::Nested { shard });
        }
        Ok(())
    }
}

/// The sampler that the shards form.
#[derive(Clone, Debug)]
pub(crate) struct ShardedVocab {
    pub(crate) of: Description,
    pub(crate) shards_plan: Plan,
}

impl ShardedVocab {
    /// Checks that the shards, in order, form one vocabulary and can be merged. The other shards must agree with shard
    /// 0. `backend` names the sampler in its [`Capabilities`].
    pub(crate) fn of(shards: &[ShardInfo], backend: &'static str) -> Result<ShardedVocab, ShardError> {
        let first = shards.first().ok_or(ShardError::NoShards)?;
        let (plan, merge) = (first.plan, first.merge);
        for (shard, s) in shards.iter().enumerate() {
            s.check_against(first, shard, shards.len())?;
        }
        check_heads(shards)?;
        if merge == ShardMerge::LogMass && plan.max_logprobs.is_none() {
            return Err(ShardError::NoLogMass);
        }
        check_tiling(shards, first.vocab_size)?;
        let capabilities = Capabilities {
            backend,
            variant: Variant::Sharded,
            exactness: match merge {
                ShardMerge::Winners => Exactness::Pathwise,
                ShardMerge::LogMass => Exactness::InDistribution,
            },
            input: Input::Hidden,
            without_replacement: merge == ShardMerge::Winners && shards.iter().all(|s| s.without_replacement),
            knobs: knobs(shards, merge),
            canonical: shards.iter().all(|s| s.canonical),
            shadow: false,
        };
        let shape = Shape::whole(first.vocab_size, first.input);
        Ok(ShardedVocab { of: Description { capabilities, shape, plan }, shards_plan: plan })
    }

    /// Takes the number of rows that the shards are planned for now.
    pub(crate) fn replan(&mut self, max_rows: usize) {
        (self.of.plan.max_rows, self.shards_plan.max_rows) = (max_rows, max_rows);
    }

    /// Restricts the plan to one within the shards' own.
    pub(crate) fn restrict(&mut self, requested: Plan) -> Result<(), ShardError> {
        let planned = self.shards_plan;
        let fits = requested.max_rows <= planned.max_rows
            && requested.max_draws <= planned.max_draws
            && requested.max_logprobs <= planned.max_logprobs
            && requested.canonical == planned.canonical;
        if !fits {
            return Err(ShardError::BeyondShards { requested, planned });
        }
        self.of.plan = requested;
        Ok(())
    }
}

/// The knobs of the sampler. A shard applies adjustments of single logits by itself.
///
/// Filters, and log-probabilities of other laws than the drawn one, depend on all shards: they need a scan on every
/// shard, and the merge by winners.
fn knobs(shards: &[ShardInfo], merge: ShardMerge) -> Knobs {
    let adjustments = if shards.iter().all(|s| s.adjusts) { Knobs::ADJUSTMENTS } else { Knobs::NONE };
    let filters = Knobs::FILTERS.union(Knobs::LOGPROBS).with(Knob::Kept);
    let has_scans = merge == ShardMerge::Winners && shards.iter().all(|s| s.scans);
    adjustments.union(if has_scans { filters } else { Knobs::NONE })
}

/// Checks that all shards that state their head's type and transforms agree. Shards without tokens have no transforms.
fn check_heads(shards: &[ShardInfo]) -> Result<(), ShardError> {
    let numbered = || shards.iter().enumerate();
    let weights = numbered().filter_map(|(shard, s)| Some((shard, format!("{:?}", s.weight?))));
    check_equal("a weight of type", weights)?;
    let heads = numbered().filter(|(_, s)| !s.tokens.is_empty());
    check_equal("a head with", heads.filter_map(|(shard, s)| Some((shard, s.transforms?.to_string()))))
}

/// Checks that all stated values are the same.
fn check_equal(what: &'static str, mut stated: impl Iterator<Item = (usize, String)>) -> Result<(), ShardError> {
    let Some((other, expected)) = stated.next() else { return Ok(()) };
    match stated.find(|(_, found)| *found != expected) {
        Some((shard, found)) => Err(ShardError::Mismatch { shard, other, what, expected, found }),
        None => Ok(()),
    }
}

/// Checks that the shards cover the vocabulary in order. Shards without tokens may have any position.
fn check_tiling(shards: &[ShardInfo], vocab_size: u32) -> Result<(), ShardError> {
    let mut end = 0;
    for (shard, s) in shards.iter().enumerate().filter(|(_, s)| !s.tokens.is_empty()) {
        if s.tokens.start > end {
            return Err(ShardError::Gap { shard, from: end, to: s.tokens.start });
        }
        if s.tokens.start < end {
            return Err(ShardError::Overlap { shard, start: s.tokens.start, end });
        }
        end = s.tokens.end;
        if end > vocab_size {
            return Err(ShardError::Beyond { shard, end, vocab_size });
        }
    }
    if end < vocab_size {
        return Err(ShardError::Gap { shard: shards.len(), from: end, to: vocab_size });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(tokens: Range<u32>) -> ShardInfo {
        ShardInfo {
            tokens,
            vocab_size: 10,
            input: 4,
            plan: Plan { max_rows: 3, max_draws: 5, max_logprobs: Some(2), canonical: false },
            merge: ShardMerge::Winners,
            weight: Some(DType::BF16),
            transforms: Some(Transforms { bias: false, soft_cap: Some(30.0), scale: 2.0 }),
            rank: 0,
            world: 1,
            takes_hidden: true,
            pathwise: true,
            draws_shards: false,
            without_replacement: true,
            adjusts: false,
            scans: true,
            canonical: true,
        }
    }

    #[test]
    fn bytes_carry_the_shard_info() {
        let mut bytes = Vec::new();
        for merge in [ShardMerge::Winners, ShardMerge::LogMass] {
            for max_logprobs in [None, Some(0), Some(7)] {
                let weight = max_logprobs.map(|_| DType::F32);
                let mut d = ShardInfo { merge, weight, rank: 3, world: 7, ..info(3..9) };
                d.transforms =
                    max_logprobs.map(|_| Transforms { bias: true, soft_cap: weight.map(|_| 5.0), scale: -1.0 });
                d.plan.max_logprobs = max_logprobs;
                d.encode(&mut bytes);
                assert_eq!(ShardInfo::decode(&bytes), Ok(d));
            }
        }
        for cut in 0..bytes.len() {
            assert_eq!(ShardInfo::decode(&bytes[..cut]), Err(WireError::Truncated { at: cut }));
        }
        bytes.push(0);
        assert!(matches!(ShardInfo::decode(&bytes), Err(WireError::Trailing { extra: 1, .. })));
        bytes[0] ^= 1;
        assert!(matches!(ShardInfo::decode(&bytes), Err(WireError::Invalid { .. })));
    }

    /// The vocabulary of these shards. Shards with the default rank and world get their numbers from the order.
    fn whole(shards: &[ShardInfo]) -> Result<ShardedVocab, ShardError> {
        let number = |(r, d): (usize, &ShardInfo)| {
            let (rank, world) = if (d.rank, d.world) == (0, 1) { (r, shards.len()) } else { (d.rank, d.world) };
            ShardInfo { rank, world, ..d.clone() }
        };
        ShardedVocab::of(&shards.iter().enumerate().map(number).collect::<Vec<_>>(), "test")
    }

    #[test]
    fn unequal_and_empty_shards_make_up_a_vocabulary() {
        let shards = [0..0, 0..7, 7..7, 7..8, 10..10, 8..10].map(info);
        assert_eq!(whole(&shards).unwrap().of.shape.tokens, 0..10);
    }

    #[test]
    fn gaps_and_overlaps_are_named() {
        let gap = |parts: [Range<u32>; 2]| whole(&parts.map(info)).unwrap_err();
        assert!(matches!(gap([0..4, 5..10]), ShardError::Gap { shard: 1, from: 4, to: 5 }));
        assert!(matches!(gap([1..4, 4..10]), ShardError::Gap { shard: 0, from: 0, to: 1 }));
        assert!(matches!(gap([0..4, 4..9]), ShardError::Gap { shard: 2, from: 9, to: 10 }));
        assert!(matches!(gap([0..4, 3..10]), ShardError::Overlap { shard: 1, start: 3, end: 4 }));
        assert!(matches!(gap([5..10, 0..5]), ShardError::Gap { shard: 0, from: 0, to: 5 }));
        assert!(matches!(gap([0..5, 5..11]), ShardError::Beyond { shard: 1, end: 11, vocab_size: 10 }));
        assert!(matches!(whole(&[]), Err(ShardError::NoShards)));
    }

    #[test]
    fn shards_that_differ_are_named() {
        let with = |change: fn(&mut ShardInfo)| {
            let mut other = info(5..10);
            change(&mut other);
            whole(&[info(0..5), other]).unwrap_err()
        };
        let mismatch = |error: ShardError| match error {
            ShardError::Mismatch { shard, other, what, expected, found } => ((shard, other, what), expected, found),
            error => panic!("{error}"),
        };
        let differs = |what, expected: &str, found: &str, change| {
            assert_eq!(mismatch(with(change)), ((1, 0, what), expected.into(), found.into()));
        };
        differs("vocabulary size", "10", "11", |d| d.vocab_size = 11);
        differs("hidden size", "4", "5", |d| d.input = 5);
        differs("a plan with", "max_rows 3", "max_rows 2", |d| d.plan.max_rows = 2);
        differs("merge", "winners", "log-mass", |d| d.merge = ShardMerge::LogMass);
        differs("a weight of type", "BF16", "F16", |d| d.weight = Some(DType::F16));
        let head = Transforms { bias: true, soft_cap: None, scale: 2.0 };
        differs("a head with", "no bias, soft-cap 30, scale 2", "a bias, no soft-cap, scale 2", |d| {
            d.transforms = Some(Transforms { bias: true, soft_cap: None, scale: 2.0 });
        });
        assert!(matches!(with(|d| d.takes_hidden = false), ShardError::Input { shard: 1 }));
        assert!(matches!(with(|d| d.pathwise = false), ShardError::NotPathwise { shard: 1 }));
        let rank = |error| match error {
            ShardError::Rank { shard: 1, world: 2, found_rank, found_world } => (found_rank, found_world),
            error => panic!("{error}"),
        };
        assert_eq!(rank(with(|d| (d.rank, d.world) = (1, 3))), (1, 3));
        assert_eq!(rank(with(|d| (d.rank, d.world) = (0, 2))), (0, 2));
        // A shard that states nothing, or has no tokens, is not the shard of the comparison.
        let silent = ShardInfo { weight: None, ..info(0..0) };
        let others = [info(0..5), ShardInfo { transforms: Some(head), ..info(5..10) }];
        let error = whole(&[&[silent.clone()][..], &others].concat()).unwrap_err();
        assert_eq!(mismatch(error).0, (2, 1, "a head with"));
        let others = [info(0..5), ShardInfo { weight: Some(DType::F16), ..info(5..10) }];
        let error = whole(&[&[silent][..], &others].concat()).unwrap_err();
        assert_eq!(mismatch(error).0, (2, 1, "a weight of type"));
    }

    #[test]
    fn the_merge_by_log_mass_takes_any_exact_sampler_that_knows_its_mass() {
        let mut d = ShardInfo { merge: ShardMerge::LogMass, pathwise: false, ..info(0..10) };
        let w = whole(std::slice::from_ref(&d)).unwrap();
        assert_eq!(w.of.capabilities.exactness, Exactness::InDistribution);
        assert!(!w.of.capabilities.without_replacement);
        d.plan.max_logprobs = None;
        assert!(matches!(whole(&[d]), Err(ShardError::NoLogMass)));
    }

    #[test]
    fn shards_that_draw_shards_are_refused() {
        // Both draws would use the same noise, for rank r of the inner and of the outer shards.
        let d = ShardInfo { merge: ShardMerge::LogMass, pathwise: false, draws_shards: true, ..info(0..10) };
        assert!(matches!(whole(&[d]), Err(ShardError::Nested { shard: 0 })));
    }

    #[test]
    fn a_plan_can_be_restricted_but_not_widened() {
        let mut w = whole(&[info(0..10)]).unwrap();
        let narrow = Plan { max_rows: 2, max_draws: 5, max_logprobs: None, canonical: false };
        w.restrict(narrow).unwrap();
        assert_eq!(w.of.plan, narrow);
        for wide in [
            Plan { max_rows: 4, ..narrow },
            Plan { max_draws: 6, ..narrow },
            Plan { max_logprobs: Some(3), ..narrow },
            Plan { canonical: true, ..narrow },
        ] {
            assert!(matches!(w.restrict(wide), Err(ShardError::BeyondShards { .. })));
        }
    }
}
