//! The four variants in float64, as short as possible. Tests compare every fast path with this file.
//!
//! Dot products are [`canonical`](crate::backend::canonical), log-masses are float64 sums, noise and transforms are the scalar
//! definitions of this crate. The reference holds the whole row of logits, and is slow. Over a head with a shadow, draws
//! compute only the logits of tokens that can win.

mod by_shadow;

use crate::backend::canonical::canonical_logit;
use crate::backend::{Batch, Request, RowSummary, Scan, check_scan};
use crate::error::{RowError, SampleError, Stage, StagedError};
use crate::head::Head;
use crate::matrix::Matrix;
use crate::noise::Domain;
use crate::params::adjustments::Adjustments;
use crate::params::filters::{Filter, Filters};
use crate::params::knob::{Knob, Knobs};
use crate::params::transform::first_invalid;
use crate::params::{Row, RowParams};
use crate::sampler::samples::Samples;
use crate::sampler::{Capabilities, Description, Exactness, Input, PerturbedArgmax, Plan, Shape, Variant, check_call};
use crate::summary::mass_histogram::MassHistogram;
use crate::summary::winner::{Candidate, TopList, Winner};
use core::ops::Range;

/// The variant of a [`Reference`].
#[derive(Clone, Debug, PartialEq)]
pub enum ReferenceVariant {
    /// The argmax of the whole perturbed row (Alg. I.1, and Alg. 1 for any tiles).
    Tiled,
    /// Groups of `n` tokens, and a draw of the group with separate noise (Alg. I.2).
    Grouped(u32),
    /// Groups of `n` tokens through the binary merge (Alg. I.3).
    Online(u32),
    /// Shards that begin at these tokens, and a draw of the shard with separate noise (Alg. I.4).
    Sharded(Vec<u32>),
}

/// The transformed logits of a row, from its raw logits.
pub(crate) fn transformed(row: &Row<'_>, raw: &[f32], first: u32) -> Result<Vec<f32>, RowError> {
    let mut logits = raw.to_vec();
    first_invalid(first, &logits).map_or(Ok(()), Err)?;
    row.transform.apply(first, &mut logits);
    first_invalid(first, &logits).map_or(Ok(()), Err)?;
    if logits.iter().all(|&l| l == f32::NEG_INFINITY) { Err(RowError::NoFiniteLogit) } else { Ok(logits) }
}

/// Every token with a finite logit, with its perturbed score.
fn candidates<'a>(row: &'a Row<'_>, draw: u32, logits: &'a [f32], first: u32) -> impl Iterator<Item = Candidate> + 'a {
    let finite = (first..).zip(logits).filter(|(_, l)| **l > f32::NEG_INFINITY);
    finite.map(move |(token, &logit)| {
        let noise = if row.greedy { 0.0 } else { row.noise.gumbel(Domain::Token, draw, token) };
        Candidate { winner: Winner::new(logit + noise, token), logit }
    })
}

/// Paper Alg. I.1: the maximum of the perturbed logits.
pub fn tiled(row: &Row<'_>, draw: u32, logits: &[f32], first: u32) -> Candidate {
    candidates(row, draw, logits, first).fold(Candidate::NONE, Candidate::merge)
}

/// Sets the logits that the filters drop to -inf, and rescales the others.
///
/// # Errors
/// The errors of [`Filters::drawable`].
pub fn filter(filters: &Filters, first: u32, logits: &mut [f32]) -> Result<(), RowError> {
    let finite = (first..).zip(&*logits).filter(|(_, l)| **l > f32::NEG_INFINITY);
    let mut sorted: Vec<_> = finite.map(|(t, &logit)| Candidate { winner: Winner::new(logit, t), logit }).collect();
    sorted.sort_by(|a, b| b.logit.partial_cmp(&a.logit).expect("no NaN").then(a.winner.token.cmp(&b.winner.token)));
    let kept = filters.drawable(&sorted[kept(filters, &sorted)])?;
    logits.fill(f32::NEG_INFINITY);
    kept.iter().for_each(|c| logits[(c.winner.token - first) as usize] = c.logit * filters.rescale);
    Ok(())
}

/// `ln sum e^l` in float64.
pub fn log_mass(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return f64::NEG_INFINITY;
    }
    f64::from(max) + logits.iter().map(|&l| (f64::from(l) - f64::from(max)).exp()).sum::<f64>().ln()
}

/// Paper Alg. I.2 and I.4: draws a group by its log-mass, then a token of the group. `groups` are (number, tokens);
/// `domain` is the noise of the group's draw.
pub fn grouped(
    row: &Row<'_>,
    draw: u32,
    logits: &[f32],
    first: u32,
    groups: impl Iterator<Item = (u32, Range<u32>)>,
    domain: Domain,
) -> Candidate {
    let part = |g: &Range<u32>| &logits[(g.start - first) as usize..(g.end - first) as usize];
    let scored = groups.map(|(k, g)| (log_mass(part(&g)) + f64::from(row.noise.gumbel(domain, draw, k)), g));
    let best = scored.reduce(|a, b| if b.0 > a.0 { b } else { a });
    best.map_or(Candidate::NONE, |(_, g)| tiled(row, draw, part(&g), g.start))
}

/// Paper Alg. I.3: merges groups one after the other by the binary merge.
pub fn online(
    row: &Row<'_>,
    draw: u32,
    logits: &[f32],
    first: u32,
    groups: impl Iterator<Item = (u32, Range<u32>)>,
) -> Candidate {
    let mut sample = Candidate::NONE;
    let mut running = f64::NEG_INFINITY;
    for (k, g) in groups {
        let part = &logits[(g.start - first) as usize..(g.end - first) as usize];
        let mass = log_mass(part);
        let replace = 1.0 / (1.0 + (running - mass).exp());
        if mass > f64::NEG_INFINITY && row.noise.coin(draw, k) < replace {
            sample = tiled(row, draw, part, g.start);
        }
        let high = running.max(mass);
        if high > f64::NEG_INFINITY {
            running = high + ((running - high).exp() + (mass - high).exp()).ln();
        }
    }
    sample
}

/// The run of a row's tokens that the filters keep. `sorted` is sorted by descending logits, then by token.
pub fn kept(filters: &Filters, sorted: &[Candidate]) -> Range<usize> {
    let logit = |i: usize| f64::from(sorted[i].logit);
    let n = sorted.len() as f64;
    let mean = (0..sorted.len()).map(logit).sum::<f64>() / n;
    let deviation = ((0..sorted.len()).map(|i| (logit(i) - mean).powi(2)).sum::<f64>() / n).sqrt();
    let mut run = 0..sorted.len();
    for &filter in filters.steps() {
        let start = run.start;
        let weight = |i: usize| (logit(i) - logit(start)).exp();
        let z: f64 = run.clone().map(weight).sum();
        let p = |i: usize| weight(i) / z;
        // The end of the first tokens for which `keep` holds, at least one token.
        let end = |keep: &dyn Fn(usize) -> bool| run.clone().find(|&i| i > start && !keep(i)).unwrap_or(run.end);
        // The shortest run of tokens, in the given order, whose probability reaches `share`.
        let reach = |order: &mut dyn Iterator<Item = usize>, share: f32| {
            // Weights instead of probabilities: the weights of equal logits have exact sums.
            let mut sum = 0.0;
            let more = |i: &usize| {
                let open = sum < f64::from(share) * z;
                sum += weight(*i);
                open
            };
            order.take_while(more).fold(run.end..run.start, |r, i| r.start.min(i)..r.end.max(i + 1))
        };
        run = match filter {
            Filter::TopK(k) => start..run.end.min(start.saturating_add(k as usize)),
            Filter::MinP(share) => start..end(&|i| logit(i) >= logit(start) + f64::from(share).ln()),
            Filter::TopNSigma(n) => start..end(&|i| logit(i) >= logit(start) - f64::from(n) * deviation),
            Filter::Epsilon(share) => start..end(&|i| p(i) >= f64::from(share)),
            Filter::Xtc(share) => end(&|i| p(i) >= f64::from(share)) - 1..run.end,
            Filter::TopP(share) => reach(&mut run.clone(), share),
            Filter::TypicalP(share) => {
                // Surprisal and entropy, both minus the surprisal of the first token.
                let fall = |i: usize| logit(start) - logit(i);
                let entropy: f64 = run.clone().map(|i| p(i) * fall(i)).sum();
                let distance = |i: &usize| (fall(*i) - entropy).abs();
                let mut order: Vec<usize> = run.clone().collect();
                // Of equal distances, the more probable token comes first; on the probable side, the later index.
                order.sort_by(|a, b| distance(a).total_cmp(&distance(b)).then(by_side(fall(*a) < entropy, a, b)));
                reach(&mut order.into_iter(), share)
            }
        };
    }
    run
}

/// The order outwards from the entropy: falling indices on the probable side, rising indices on the other.
fn by_side(probable: bool, a: &usize, b: &usize) -> core::cmp::Ordering {
    if probable { b.cmp(a) } else { a.cmp(b) }
}

/// Cuts tokens into groups at the multiples of `size`. The number of a group is its first multiple divided by `size`.
pub fn groups(tokens: Range<u32>, size: u32) -> impl Iterator<Item = (u32, Range<u32>)> {
    let size = size.max(1);
    let numbers = if tokens.is_empty() { 0..0 } else { tokens.start / size..tokens.end.div_ceil(size) };
    numbers.map(move |k| (k, (k * size).max(tokens.start)..k.saturating_add(1).saturating_mul(size).min(tokens.end)))
}

/// The reference as a sampler.
#[derive(Clone, Debug)]
pub struct Reference<'w> {
    head: Head<'w>,
    plan: Plan,
    variant: ReferenceVariant,
}

impl<'w> Reference<'w> {
    /// A reference sampler for a head.
    pub fn new(head: Head<'w>, plan: Plan, variant: ReferenceVariant) -> Self {
        Reference { head, plan, variant }
    }

    /// The raw logits of a hidden state (float32), for the head's tokens.
    pub fn raw_logits(&self, hidden: &[f32]) -> Vec<f32> {
        let mut scratch = vec![0.0; hidden.len()];
        self.head.tokens().map(|token| canonical_logit(&self.head, token, hidden, &mut scratch)).collect()
    }

    /// The raw logits that a row needs; -inf for tokens that cannot win, if the row only draws and the head has a shadow.
    /// Also returns whether the row needs all logits in spite of a shadow.
    fn needed_logits(&self, row: &Row<'_>, hidden: &[f32]) -> (Vec<f32>, bool) {
        let is_pathwise = row.greedy || self.variant == ReferenceVariant::Tiled;
        let needs_all = row.filters.is_some() || row.logprobs.or(row.raw_logprobs).is_some() || row.kept;
        let some = (is_pathwise && !needs_all).then(|| by_shadow::possible_winners(&self.head, row, hidden));
        let all = || (self.raw_logits(hidden), self.capabilities().shadow);
        some.flatten().map_or_else(all, |some| (some, false))
    }

    fn draw(&self, row: &Row<'_>, draw: u32, logits: &[f32]) -> Candidate {
        let tokens = self.head.tokens();
        let first = tokens.start;
        // In every variant, a greedy row takes the argmax.
        match &self.variant {
            _ if row.greedy => tiled(row, draw, logits, first),
            ReferenceVariant::Tiled => tiled(row, draw, logits, first),
            ReferenceVariant::Grouped(n) => grouped(row, draw, logits, first, groups(tokens, *n), Domain::Group),
            ReferenceVariant::Online(n) => online(row, draw, logits, first, groups(tokens, *n)),
            ReferenceVariant::Sharded(starts) => {
                let ends = starts.iter().skip(1).copied().chain([tokens.end]);
                let shards = (0..).zip(starts.iter().zip(ends).map(|(&a, b)| a..b));
                grouped(row, draw, logits, first, shards, Domain::Shard)
            }
        }
    }

    /// Writes log-probabilities of the raw logits to the last row of `out`.
    fn note_raw(&self, most: u32, greedy: &Row<'_>, raw: &[f32], out: &mut Samples) {
        let first = self.head.tokens().start;
        let mut mass = MassHistogram::default();
        mass.extend_from_slice(raw);
        let mut top = TopList::new(most as usize, 0.0);
        candidates(greedy, 0, raw, first).for_each(|c| top.push(c));
        let row = out.len() - 1;
        let draws = out.row(row).map_or(&[][..], |row| row.draws);
        let drawn: Vec<f32> = draws.iter().map(|d| raw[(d.token - first) as usize]).collect();
        out.set_raw(row, &mass, top.as_slice(), drawn);
    }

    /// Writes logits of requested tokens and ranks of drawn tokens to the last row of `out`, in the law of `logits`.
    fn note_tokens(&self, row: &Row<'_>, logits: &[f32], out: &mut Samples) {
        let (first, last) = (self.head.tokens().start, out.len() - 1);
        let logit = |token: u32| {
            let at = token.checked_sub(first).map(|at| at as usize);
            at.and_then(|at| logits.get(at)).copied().unwrap_or(f32::NEG_INFINITY)
        };
        let rank = |drawn: u32| {
            let own = logit(drawn);
            let is_before = |&(token, &l): &(u32, &f32)| l > own || (l == own && token < drawn);
            1 + (first..).zip(logits).filter(is_before).count() as u32
        };
        let draws = out.row(last).map_or(&[][..], |row| row.draws);
        let ranks: Vec<u32> = draws.iter().filter(|_| row.ranks).map(|d| rank(d.token)).collect();
        out.set_tokens(last, row.logprob_token_ids.iter().map(|&token| (token, logit(token))), ranks);
    }

    fn row(&self, row: &Row<'_>, raw: &[f32], out: &mut Samples) -> Result<(), RowError> {
        let first = self.head.tokens().start;
        let mut logits = transformed(row, raw, first)?;
        if let Some(filters) = &row.filters {
            filter(filters, first, &mut logits)?;
        }
        let last = row.first_draw + row.draws;
        let draws: Vec<Candidate> = if row.without_replacement {
            let mut list = TopList::new(row.draws as usize, 0.0);
            candidates(row, row.first_draw, &logits, first).for_each(|c| list.push(c));
            let available = list.as_slice().len() as u32;
            if available < row.draws {
                return Err(RowError::SupportTooSmall { draws: row.draws, available });
            }
            list.as_slice().to_vec()
        } else {
            (row.first_draw..last).map(|draw| self.draw(row, draw, &logits)).collect()
        };
        let mut mass = MassHistogram::default();
        mass.extend_from_slice(&logits);
        let mut top = TopList::new(row.logprobs.unwrap_or(0) as usize, 0.0);
        let greedy = Row { greedy: true, ..*row };
        candidates(&greedy, 0, &logits, first).for_each(|c| top.push(c));
        out.push_row(draws, row.logprobs.is_some().then_some(&mass), top.as_slice());
        if let Some(most) = row.raw_logprobs {
            self.note_raw(most, &greedy, raw, out);
        }
        if row.logprobs.or(row.raw_logprobs).is_some() {
            self.note_tokens(row, if row.logprobs.is_some() { &logits } else { raw }, out);
        }
        if row.kept {
            let kept = (first..).zip(&logits).filter(|(_, l)| **l > f32::NEG_INFINITY);
            out.set_kept(kept.map(|(token, _)| token), log_mass(&logits), self.head.vocab_size());
        }
        Ok(())
    }
}

impl PerturbedArgmax for Reference<'_> {
    fn description(&self) -> Description {
        let (variant, exactness) = match self.variant {
            ReferenceVariant::Tiled => (Variant::Tiled, Exactness::Pathwise),
            ReferenceVariant::Grouped(_) => (Variant::Grouped, Exactness::InDistribution),
            ReferenceVariant::Online(_) => (Variant::Online, Exactness::InDistribution),
            ReferenceVariant::Sharded(_) => (Variant::Sharded, Exactness::InDistribution),
        };
        let capabilities = Capabilities {
            backend: "reference",
            variant,
            exactness,
            input: Input::Hidden,
            without_replacement: exactness == Exactness::Pathwise,
            knobs: Knobs::ADJUSTMENTS.union(Knobs::FILTERS).union(Knobs::LOGPROBS).with(Knob::Kept),
            canonical: true,
            shadow: self.variant == ReferenceVariant::Tiled && self.head.shadow().is_some(),
        };
        Description { capabilities, shape: Shape::of(&self.head), plan: self.plan }
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan)?;
        let mut hidden = vec![0.0; input.cols()];
        let mut adjustments = Adjustments::default();
        adjustments.collect(rows);
        let mut fallback_rows = 0;
        for (r, params) in rows.iter().enumerate() {
            input.row_to_f32(r, &mut hidden);
            let checked = params.check(adjustments.row(r), &self.capabilities(), &self.plan, self.head.vocab_size());
            let outcome = checked.and_then(|row| {
                let (raw, is_fallback) = self.needed_logits(&row, &hidden);
                fallback_rows += usize::from(is_fallback);
                self.row(&row, &raw, out)
            });
            if let Err(error) = outcome {
                out.push_error(error);
            }
        }
        out.set_fallback_rows(fallback_rows);
        Ok(())
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        if max_rows == 0 {
            return Err(SampleError::Backend { backend: "reference", source: "a plan needs rows".into() });
        }
        self.plan.max_rows = max_rows;
        Ok(())
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        (self.variant == ReferenceVariant::Tiled).then_some(self as _)
    }
}

impl Scan for Reference<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        check_scan(batch, requests, out, &self.shape(), &self.plan)?;
        let mut hidden = vec![0.0; batch.input.cols()];
        let mut adjustments = Adjustments::default();
        adjustments.collect(batch.params);
        for (r, (row, summary)) in batch.rows.iter().zip(out).enumerate().filter(|(r, _)| requests[*r] != Request::Skip)
        {
            let Ok(row) = row else { continue };
            let row = row.with_adjustments(adjustments.row(r));
            batch.input.row_to_f32(r, &mut hidden);
            summary.clear();
            let first = self.head.tokens().start;
            let (raw, is_fallback) = self.needed_logits(&row, &hidden);
            let logits = match transformed(&row, &raw, first) {
                Ok(logits) => logits,
                // Other shards may have a finite logit.
                Err(RowError::NoFiniteLogit) => vec![f32::NEG_INFINITY; raw.len()],
                Err(error) => {
                    let is_raw = !raw.iter().all(|&logit| logit < f32::INFINITY);
                    let stage = if is_raw { Stage::Raw } else { Stage::Transformed };
                    summary.error = Some(StagedError { stage, error });
                    continue;
                }
            };
            summary.of(&row, requests[r], first, &logits);
            summary.of_raw(&row, requests[r], first, &raw);
            summary.is_fallback = is_fallback;
        }
        Ok(())
    }
}
