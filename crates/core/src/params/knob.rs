//! The names of knobs, and sets of knobs.

use core::fmt;

macro_rules! knobs {
    ($($knob:ident $name:literal,)*) => {
        /// A knob of [`RowParams`](crate::RowParams) or [`Plan`](crate::Plan), as named in messages.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[allow(missing_docs)] // each variant is the field of the same name
        pub enum Knob { $($knob,)* }

        impl Knob {
            /// All knobs.
            pub const ALL: &[Knob] = &[$(Knob::$knob,)*];

            /// The field's name.
            pub const fn name(self) -> &'static str {
                match self { $(Knob::$knob => $name,)* }
            }
        }
    };
}

knobs! {
    Temperature "temperature",
    Position "position",
    Draws "draws",
    FirstDraw "first_draw",
    WithoutReplacement "without_replacement",
    Logprobs "logprobs",
    LogprobsMode "logprobs_mode",
    LogprobTokenIds "logprob_token_ids",
    Ranks "ranks",
    Mask "mask",
    Banned "banned",
    MinTokens "min_tokens",
    StopTokenIds "stop_token_ids",
    LogitBias "logit_bias",
    RepetitionPenalty "repetition_penalty",
    FrequencyPenalty "frequency_penalty",
    PresencePenalty "presence_penalty",
    DryMultiplier "dry_multiplier",
    DryBase "dry_base",
    DrySequenceBreakers "dry_sequence_breakers",
    TopK "top_k",
    TopP "top_p",
    MinP "min_p",
    TopNSigma "top_n_sigma",
    EpsilonCutoff "epsilon_cutoff",
    TypicalP "typical_p",
    XtcThreshold "xtc_threshold",
    XtcProbability "xtc_probability",
    Kept "kept",
    Canonical "canonical",
    MaxRows "max_rows",
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of knobs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Knobs(u64);

impl Knobs {
    /// No knobs.
    pub const NONE: Knobs = Knobs(0);

    /// Every knob.
    pub const ALL: Knobs = Knobs::of(Knob::ALL);

    /// The filters: knobs that keep or drop tokens by their probabilities.
    pub const FILTERS: Knobs = Knobs::of(&[
        Knob::TopK,
        Knob::TopP,
        Knob::MinP,
        Knob::TopNSigma,
        Knob::EpsilonCutoff,
        Knob::TypicalP,
        Knob::XtcThreshold,
    ]);

    /// Requests for log-probabilities other than those of the law of the draws.
    pub const LOGPROBS: Knobs = Knobs::of(&[Knob::LogprobsMode, Knob::LogprobTokenIds, Knob::Ranks]);

    /// Knobs that change single logits, except mask and logit bias.
    pub const ADJUSTMENTS: Knobs = Knobs::of(&[
        Knob::Banned,
        Knob::MinTokens,
        Knob::RepetitionPenalty,
        Knob::FrequencyPenalty,
        Knob::PresencePenalty,
        Knob::DryMultiplier,
    ]);

    /// The set of the given knobs.
    pub const fn of(knobs: &[Knob]) -> Knobs {
        let (mut bits, mut i) = (0, 0);
        while i < knobs.len() {
            bits |= 1 << knobs[i] as u32;
            i += 1;
        }
        Knobs(bits)
    }

    /// Whether a knob is in the set.
    pub const fn contains(self, knob: Knob) -> bool {
        self.0 >> knob as u32 & 1 == 1
    }

    /// The knobs of either set.
    #[must_use]
    pub const fn union(self, other: Knobs) -> Knobs {
        Knobs(self.0 | other.0)
    }

    /// The set with one more knob.
    #[must_use]
    pub const fn with(self, knob: Knob) -> Knobs {
        Knobs(self.0 | 1 << knob as u32)
    }

    /// The knobs of both sets.
    #[must_use]
    pub const fn intersection(self, other: Knobs) -> Knobs {
        Knobs(self.0 & other.0)
    }

    /// The knobs of this set that are not in the other.
    #[must_use]
    pub const fn without(self, other: Knobs) -> Knobs {
        Knobs(self.0 & !other.0)
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The knobs, in the order of [`Knob::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Knob> {
        let all = if self.is_empty() { &[] } else { Knob::ALL };
        all.iter().copied().filter(move |&knob| self.contains(knob))
    }
}

impl fmt::Debug for Knobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Knob::name)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_what_they_were_given() {
        let set = Knobs::of(&[Knob::TopK, Knob::MaxRows]);
        assert_eq!(set.iter().collect::<Vec<_>>(), [Knob::TopK, Knob::MaxRows]);
        assert!(set.contains(Knob::TopK) && !set.contains(Knob::TopP));
        assert_eq!(set.intersection(Knobs::FILTERS), Knobs::of(&[Knob::TopK]));
        assert_eq!(set.without(Knobs::FILTERS), Knobs::of(&[Knob::MaxRows]));
        assert_eq!(set.union(Knobs::FILTERS).iter().count(), Knobs::FILTERS.iter().count() + 1);
        assert!(Knob::ALL.len() <= 64 && Knobs::NONE.is_empty());
    }
}
