//! The handshake: what each shard reports, and the check that the shards form one vocabulary.

use crate::codec::call::{element, of_element};
use crate::codec::wire::{Reader, WireError};
use crate::error::ShardError;
use crate::merge::ShardMerge;
use crate::options::{ShardOptions, Transforms};
use core::ops::Range;
use flash_sampling_core::{Capabilities, DType, Exactness, Input, Knob, Knobs, PerturbedArgmax, Plan, Shape, Variant};

/// First bytes of a description; the last two digits are the version of the format.
const MAGIC: u32 = u32::from_le_bytes(*b"FS07");

/// The report of a shard in the handshake.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ShardInfo {
    /// The tokens of the shard.
    pub(crate) tokens: Range<u32>,
    pub(crate) vocab_size: u32,
    pub(crate) input: usize,
    pub(crate) plan: Plan,
    pub(crate) merge: ShardMerge,
    check_tokens: bool,
    weight: Option<DType>,
    transforms: Option<Transforms>,
    /// Its own rank and world.
    rank: (usize, usize),
    takes_hidden: bool,
    pathwise: bool,
    /// Whether it draws shards of its own, with the noise of shards.
    draws_shards: bool,
    without_replacement: bool,
    /// Whether it supports all of [`Knobs::ADJUSTMENTS`].
    adjusts: bool,
    /// Whether it has a [`Scan`](flash_sampling_core::Scan), for rows with filters or raw log-probabilities.
    scans: bool,
    canonical: bool,
}

impl ShardInfo {
    /// The report of a sampler; `rank` is the shard's number, and the number of shards.
    pub(crate) fn of(sampler: &mut dyn PerturbedArgmax, options: &ShardOptions, rank: (usize, usize)) -> Self {
        let (shape, can) = (sampler.shape(), sampler.capabilities());
        ShardInfo {
            tokens: shape.tokens,
            vocab_size: shape.vocab_size,
            input: shape.input,
            plan: sampler.plan(),
            merge: options.merge,
            check_tokens: options.check_tokens,
            weight: options.weight,
            transforms: options.transforms,
            rank,
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
        for word in [MAGIC, self.tokens.start, self.tokens.end, self.vocab_size, self.plan.max_draws] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&self.plan.max_logprobs.unwrap_or(0).to_le_bytes());
        for size in [self.input, self.plan.max_rows, self.rank.0, self.rank.1] {
            bytes.extend_from_slice(&(size as u64).to_le_bytes());
        }
        let flags = [
            self.plan.max_logprobs.is_some(),
            self.plan.canonical,
            self.merge == ShardMerge::LogMass,
            self.check_tokens,
            self.takes_hidden,
            self.pathwise,
            self.draws_shards,
            self.without_replacement,
            self.adjusts,
            self.scans,
            self.canonical,
        ];
        bytes.extend(flags.map(u8::from));
        bytes.push(self.weight.map_or(u8::MAX, element));
        bytes.push(u8::from(self.transforms.is_some()));
        if let Some(Transforms { bias, soft_cap, scale }) = self.transforms {
            bytes.extend([u8::from(bias), u8::from(soft_cap.is_some())]);
            bytes.extend_from_slice(&soft_cap.unwrap_or(0.0).to_le_bytes());
            bytes.extend_from_slice(&scale.to_le_bytes());
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader::new(bytes);
        match reader.u32()? {
            MAGIC => {}
            magic if magic as u16 == MAGIC as u16 => return Err(reader.invalid("the description of another version")),
            _ => return Err(reader.invalid("not a shard's description")),
        }
        let tokens = reader.u32()?..reader.u32()?;
        let (vocab_size, max_draws, logprobs) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let (input, max_rows) = (reader.size()?, reader.size()?);
        let rank = (reader.size()?, reader.size()?);
        let max_logprobs = reader.flag()?.then_some(logprobs);
        let plan = Plan { max_rows, max_draws, max_logprobs, canonical: reader.flag()? };
        let mut info = ShardInfo {
            tokens,
            vocab_size,
            input,
            plan,
            merge: if reader.flag()? { ShardMerge::LogMass } else { ShardMerge::Winners },
            check_tokens: reader.flag()?,
            weight: None,
            transforms: None,
            rank,
            takes_hidden: reader.flag()?,
            pathwise: reader.flag()?,
            draws_shards: reader.flag()?,
            without_replacement: reader.flag()?,
            adjusts: reader.flag()?,
            scans: reader.flag()?,
            canonical: reader.flag()?,
        };
        info.weight = match reader.u8()? {
            u8::MAX => None,
            number => Some(of_element(number).ok_or_else(|| reader.invalid("an unknown type"))?),
        };
        if reader.flag()? {
            let (bias, has_cap) = (reader.flag()?, reader.flag()?);
            let (cap, scale) = (f32::from_bits(reader.u32()?), f32::from_bits(reader.u32()?));
            info.transforms = Some(Transforms { bias, soft_cap: has_cap.then_some(cap), scale });
        }
        reader.finish().map(|()| info)
    }

    /// Checks that this is shard number `shard` of `world`, can be one, and agrees with the first.
    fn check_beside(&self, first: &ShardInfo, shard: usize, world: usize) -> Result<(), ShardError> {
        let (found_rank, found_world) = self.rank;
        if self.rank != (shard, world) {
            return Err(ShardError::Rank { shard, world, found_rank, found_world });
        }
        if self.merge != first.merge {
            return Err(ShardError::Merge { shard, expected: first.merge, found: self.merge });
        }
        if self.check_tokens != first.check_tokens {
            return Err(ShardError::CheckTokens { shard, expected: first.check_tokens, found: self.check_tokens });
        }
        if !self.takes_hidden {
            return Err(ShardError::Input { shard });
        }
        if self.vocab_size != first.vocab_size {
            return Err(ShardError::VocabSize { shard, expected: first.vocab_size, found: self.vocab_size });
        }
        if self.input != first.input {
            return Err(ShardError::Hidden { shard, expected: first.input, found: self.input });
        }
        if self.plan != first.plan {
            return Err(ShardError::Plan { shard, expected: first.plan, found: self.plan });
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
    pub(crate) shape: Shape,
    pub(crate) plan: Plan,
    /// The shards' common plan.
    pub(crate) shards_plan: Plan,
    pub(crate) capabilities: Capabilities,
}

impl ShardedVocab {
    /// Checks that the shards, in order, form one vocabulary and can be merged. The other shards must agree with shard
    /// 0. `backend` names the sampler in its [`Capabilities`].
    pub(crate) fn of(shards: &[ShardInfo], backend: &'static str) -> Result<ShardedVocab, ShardError> {
        let first = shards.first().ok_or(ShardError::NoShards)?;
        let (plan, merge) = (first.plan, first.merge);
        for (shard, s) in shards.iter().enumerate() {
            s.check_beside(first, shard, shards.len())?;
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
        };
        let shape = Shape { tokens: 0..first.vocab_size, vocab_size: first.vocab_size, input: first.input };
        Ok(ShardedVocab { shape, plan, shards_plan: plan, capabilities })
    }

    /// The arguments of [`Driver::sample`](flash_sampling_core::backend::Driver::sample) that describe the sampler.
    pub(crate) fn driver_args(&self) -> (&Capabilities, &Plan, u32) {
        (&self.capabilities, &self.plan, self.shape.vocab_size)
    }

    /// Takes the number of rows that the shards are planned for now.
    pub(crate) fn replan(&mut self, max_rows: usize) {
        (self.plan.max_rows, self.shards_plan.max_rows) = (max_rows, max_rows);
    }

    /// Restricts the plan to one within the shards' own.
    pub(crate) fn restrict(&mut self, asked: Plan) -> Result<(), ShardError> {
        let planned = self.shards_plan;
        let fits = asked.max_rows <= planned.max_rows
            && asked.max_draws <= planned.max_draws
            && asked.max_logprobs <= planned.max_logprobs
            && asked.canonical == planned.canonical;
        if !fits {
            return Err(ShardError::BeyondShards { asked, planned });
        }
        self.plan = asked;
        Ok(())
    }
}

/// The knobs of the sampler. A shard applies adjustments of single logits by itself. Filters, and log-probabilities
/// other than those of the law that is drawn from, depend on all shards: they need a scan on every shard, and the merge by winners.
fn knobs(shards: &[ShardInfo], merge: ShardMerge) -> Knobs {
    let adjustments = if shards.iter().all(|s| s.adjusts) { Knobs::ADJUSTMENTS } else { Knobs::NONE };
    let filters = Knobs::FILTERS.union(Knobs::LOGPROBS).with(Knob::Kept);
    let has_scans = merge == ShardMerge::Winners && shards.iter().all(|s| s.scans);
    adjustments.union(if has_scans { filters } else { Knobs::NONE })
}

/// Checks that all shards that state their head's type and transforms agree. Shards without tokens have no transforms.
fn check_heads(shards: &[ShardInfo]) -> Result<(), ShardError> {
    let numbered = || shards.iter().enumerate();
    let mut weights = numbered().filter_map(|(shard, s)| Some((shard, s.weight?)));
    if let Some((_, expected)) = weights.next()
        && let Some((shard, found)) = weights.find(|(_, found)| *found != expected)
    {
        return Err(ShardError::Type { shard, what: "a weight", expected, found });
    }
    let mut heads =
        numbered().filter(|(_, s)| !s.tokens.is_empty()).filter_map(|(shard, s)| Some((shard, s.transforms?)));
    if let Some((other, expected)) = heads.next()
        && let Some((shard, found)) = heads.find(|(_, found)| *found != expected)
    {
        return Err(ShardError::Transforms { shard, other, expected, found });
    }
    Ok(())
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
            check_tokens: false,
            weight: Some(DType::BF16),
            transforms: Some(Transforms { bias: false, soft_cap: Some(30.0), scale: 2.0 }),
            rank: (0, 1),
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
                let mut d = ShardInfo { merge, weight, rank: (3, 7), ..info(3..9) };
                d.transforms =
                    max_logprobs.map(|_| Transforms { bias: true, soft_cap: weight.map(|_| 5.0), scale: -1.0 });
                d.check_tokens = weight.is_none();
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

    /// Numbers the shards that do not say otherwise.
    fn whole(shards: &[ShardInfo]) -> Result<ShardedVocab, ShardError> {
        let number = |(r, d): (usize, &ShardInfo)| {
            let rank = if d.rank == (0, 1) { (r, shards.len()) } else { d.rank };
            ShardInfo { rank, ..d.clone() }
        };
        ShardedVocab::of(&shards.iter().enumerate().map(number).collect::<Vec<_>>(), "test")
    }

    #[test]
    fn unequal_and_empty_shards_make_up_a_vocabulary() {
        let shards = [0..0, 0..7, 7..7, 7..8, 10..10, 8..10].map(info);
        assert_eq!(whole(&shards).unwrap().shape.tokens, 0..10);
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
        assert!(matches!(with(|d| d.vocab_size = 11), ShardError::VocabSize { shard: 1, expected: 10, found: 11 }));
        assert!(matches!(with(|d| d.input = 5), ShardError::Hidden { shard: 1, expected: 4, found: 5 }));
        assert!(matches!(with(|d| d.plan.max_rows = 2), ShardError::Plan { shard: 1, .. }));
        assert!(matches!(with(|d| d.takes_hidden = false), ShardError::Input { shard: 1 }));
        assert!(matches!(with(|d| d.pathwise = false), ShardError::NotPathwise { shard: 1 }));
        assert!(matches!(with(|d| d.merge = ShardMerge::LogMass), ShardError::Merge { shard: 1, .. }));
        assert!(matches!(with(|d| d.check_tokens = true), ShardError::CheckTokens { shard: 1, found: true, .. }));
        assert!(matches!(with(|d| d.rank = (1, 3)), ShardError::Rank { shard: 1, world: 2, found_world: 3, .. }));
        assert!(matches!(with(|d| d.rank = (0, 2)), ShardError::Rank { shard: 1, found_rank: 0, .. }));
        let error = with(|d| d.transforms = Some(Transforms { bias: true, soft_cap: None, scale: 2.0 }));
        let says =
            "shard 1 is of a head with a bias, no soft-cap, scale 2, shard 0 of one with no bias, soft-cap 30, scale 2";
        assert_eq!(error.to_string(), says);
        // A shard that states nothing, or has no tokens, is not what the others are compared with.
        let silent = ShardInfo { weight: None, ..info(0..0) };
        let head = Transforms { bias: true, soft_cap: None, scale: 2.0 };
        let others = [info(0..5), ShardInfo { transforms: Some(head), ..info(5..10) }];
        let error = whole(&[&[silent.clone()][..], &others].concat()).unwrap_err();
        assert!(matches!(error, ShardError::Transforms { shard: 2, other: 1, found, .. } if found == head));
        let others = [info(0..5), ShardInfo { weight: Some(DType::F16), ..info(5..10) }];
        let error = whole(&[&[silent][..], &others].concat()).unwrap_err();
        assert!(matches!(error, ShardError::Type { shard: 2, expected: DType::BF16, found: DType::F16, .. }));
        let error = with(|d| d.weight = Some(DType::F16));
        assert!(matches!(error, ShardError::Type { shard: 1, expected: DType::BF16, found: DType::F16, .. }));
    }

    #[test]
    fn the_merge_by_log_mass_takes_any_exact_sampler_that_knows_its_mass() {
        let mut d = ShardInfo { merge: ShardMerge::LogMass, pathwise: false, ..info(0..10) };
        let w = whole(std::slice::from_ref(&d)).unwrap();
        assert_eq!(w.capabilities.exactness, Exactness::InDistribution);
        assert!(!w.capabilities.without_replacement);
        d.plan.max_logprobs = None;
        assert!(matches!(whole(&[d]), Err(ShardError::NoLogMass)));
    }

    #[test]
    fn shards_that_draw_shards_are_refused() {
        // Both draws would use the same noise: rank r's of the inner and of the outer shards.
        let d = ShardInfo { merge: ShardMerge::LogMass, pathwise: false, draws_shards: true, ..info(0..10) };
        assert!(matches!(whole(&[d]), Err(ShardError::Nested { shard: 0 })));
    }

    #[test]
    fn a_plan_can_be_restricted_but_not_widened() {
        let mut w = whole(&[info(0..10)]).unwrap();
        let narrow = Plan { max_rows: 2, max_draws: 5, max_logprobs: None, canonical: false };
        w.restrict(narrow).unwrap();
        assert_eq!(w.plan, narrow);
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
