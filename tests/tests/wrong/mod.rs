//! A sampler with the reference's algorithm and one fault, to test that laws reject it.

mod drawing;
mod fault;
pub(crate) mod maps;

use drawing::Drawing;
pub(crate) use fault::Fault;
use flash_sampling_conformance::laws::scheme_name;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::backend::{
    Adjustments, Candidate, MassHistogram, Row, TopList, Winner, check_call, first_invalid,
};
use flash_sampling_core::reference::{self, Reference, ReferenceVariant};
use flash_sampling_core::{
    Capabilities, Description, Exactness, Head, Knob, Knobs, Matrix, Noise, Order, PerturbedArgmax, Plan, RowError,
    RowParams, SampleError, Samples,
};
use half::bf16;

const TILE: usize = 128;

impl Fault {
    fn algorithm(self) -> ReferenceVariant {
        match self {
            Fault::NextCoin | Fault::RunningMassTooEarly | Fault::OneCoin => ReferenceVariant::Online(512),
            Fault::ReuseCalledFresh => ReferenceVariant::Grouped(512),
            _ => ReferenceVariant::Tiled,
        }
    }
}

impl SamplerFactory for Fault {
    fn name(&self) -> String {
        format!("wrong/{}/{self:?}", scheme_name(&self.algorithm()))
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(self.algorithm())
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let seen = match self {
            Fault::PaddingDrawn => Head::new(head.weight()).map_err(|e| BuildError(e.to_string()))?,
            _ => head,
        };
        Ok(Box::new(Wrong { head, seen, plan, fault: *self, calls: 0 }))
    }
}

struct Wrong<'w> {
    head: Head<'w>,
    /// The head of the draws, which may include padding.
    seen: Head<'w>,
    plan: Plan,
    fault: Fault,
    calls: u64,
}

/// Keeps logits within `sigma` standard deviations of the largest. The deviation is of logits rounded to multiples of
/// 2^-12.
fn keep_by_coarse_deviation(sigma: f32, logits: &mut [f32]) {
    let rounded: Vec<f64> = logits.iter().map(|l| f64::from((l * 4096.0).round()) / 4096.0).collect();
    let n = rounded.len() as f64;
    let mean = rounded.iter().sum::<f64>() / n;
    let deviation = (rounded.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / n).sqrt();
    let cut = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max)) - f64::from(sigma) * deviation;
    logits.iter_mut().filter(|l| f64::from(**l) < cut).for_each(|l| *l = f32::NEG_INFINITY);
}

/// Keeps the higher tokens instead of the lower ones among tokens with the smallest kept logit.
fn keep_higher_tokens(seen: &[f32], logits: &mut [f32]) {
    let least = logits.iter().copied().filter(|l| *l > f32::NEG_INFINITY).fold(f32::INFINITY, f32::min);
    let mut count = logits.iter().filter(|l| **l == least).count();
    for (logit, _) in logits.iter_mut().zip(seen).rev().filter(|(_, seen)| **seen == least) {
        *logit = if count > 0 { least } else { f32::NEG_INFINITY };
        count = count.saturating_sub(1);
    }
}

impl Wrong<'_> {
    fn raw_logits(&self, hidden: &[f32], rows: usize) -> Vec<f32> {
        let mut hidden = hidden.to_vec();
        if self.fault == Fault::OddHidden && hidden.len() % 2 == 1 {
            hidden.last_mut().into_iter().for_each(|h| *h = 0.0);
        }
        let float32_sums = match self.fault {
            Fault::NotCanonical => true,
            Fault::SumsByBatch => rows > 1,
            _ => false,
        };
        if !float32_sums {
            return Reference::new(self.seen, self.plan, ReferenceVariant::Tiled).raw_logits(&hidden);
        }
        let mut weight = vec![0.0; hidden.len()];
        let dot = |token: u32| {
            self.seen.weight().row_to_f32(self.seen.weight_row(token), &mut weight);
            let mut logit = [weight.iter().zip(&hidden).fold(0f32, |sum, (w, h)| sum + w * h)];
            self.seen.transform(token, &mut logit);
            logit[0]
        };
        self.seen.tokens().map(dot).collect()
    }

    fn transform(&self, row: &Row<'_>, raw: Vec<f32>) -> Result<Vec<f32>, RowError> {
        let first = self.seen.tokens().start;
        let mut logits = raw;
        if self.fault == Fault::NanIgnored {
            logits.iter_mut().filter(|l| l.is_nan()).for_each(|l| *l = f32::NEG_INFINITY);
        }
        first_invalid(first, &logits).map_or(Ok(()), Err)?;
        let mut transform = row.transform;
        let reversed: Vec<u32>;
        match self.fault {
            Fault::MaskBitOrder => {
                reversed = transform.mask.unwrap_or_default().iter().map(|word| word.reverse_bits()).collect();
                transform.mask = transform.mask.map(|_| &reversed[..]);
                transform.apply(first, &mut logits);
            }
            Fault::BiasAfterTemperature => {
                let list = core::mem::take(&mut transform.adjustments);
                transform.apply(first, &mut logits);
                list.iter().for_each(|a| logits[(a.token - first) as usize] += a.bias);
            }
            Fault::BiasTooShort => {
                let kept = transform.adjustments.partition_point(|a| a.token + 1 < self.head.vocab_size());
                transform.adjustments = &transform.adjustments[..kept];
                transform.apply(first, &mut logits);
            }
            Fault::PenaltiesAfterTemperature => {
                let list = core::mem::take(&mut transform.adjustments);
                transform.apply(first, &mut logits);
                list.iter().for_each(|a| {
                    let logit = &mut logits[(a.token - first) as usize];
                    *logit = a.apply(*logit);
                });
            }
            Fault::RepetitionDivides => {
                let list = core::mem::take(&mut transform.adjustments);
                list.iter().for_each(|a| {
                    let logit = &mut logits[(a.token - first) as usize];
                    *logit = (*logit + a.bias) / a.repetition - a.subtract;
                });
                transform.apply(first, &mut logits);
            }
            _ => transform.apply(first, &mut logits),
        }
        first_invalid(first, &logits).map_or(Ok(()), Err)?;
        if self.fault == Fault::Bf16Logits {
            logits.iter_mut().for_each(|l| *l = bf16::from_f32(*l).to_f32());
        }
        if self.fault == Fault::DroppedTile && logits.len() > TILE {
            let last = (logits.len().max(1) - 1) / TILE * TILE;
            logits[last..].fill(f32::NEG_INFINITY);
        }
        let dead = logits.iter().all(|&l| l == f32::NEG_INFINITY);
        if dead { Err(RowError::NoFiniteLogit) } else { Ok(logits) }
    }

    fn row(
        &self,
        params: &RowParams<'_>,
        r: usize,
        hidden: &[f32],
        rows: usize,
        out: &mut Samples,
    ) -> Result<(), RowError> {
        let dropped = self.fault == Fault::FiltersDropped;
        let knobs = if dropped { Knobs::FILTERS } else { self.capabilities().knobs };
        let taken = Capabilities { knobs, ..self.capabilities() };
        let order = if self.fault == Fault::FilterBeforeTemperature { Order::LlamaCpp } else { params.order };
        let always = self.fault == Fault::XtcAlways && params.xtc_probability > 0.0;
        let xtc_probability = if always { 1.0 } else { params.xtc_probability };
        let lost = self.fault == Fault::SmallMinPLost && params.top_k > 0 && params.min_p < 3.3e-4;
        let min_p = if lost { 0.0 } else { params.min_p };
        let lower = self.fault == Fault::LowerEpsilon && params.epsilon_cutoff > 0.0;
        let epsilon_cutoff = if lower { params.epsilon_cutoff.next_down() } else { params.epsilon_cutoff };
        let coarse = self.fault == Fault::CoarseDeviation && params.top_n_sigma > 0.0;
        let (sigma, top_n_sigma) = if coarse { (params.top_n_sigma, 1e6) } else { (0.0, params.top_n_sigma) };
        let params = &RowParams { order, xtc_probability, min_p, epsilon_cutoff, top_n_sigma, ..*params };
        let mut adjustments = Adjustments::default();
        adjustments.collect([params]);
        let row = params.check(adjustments.row(0), &taken, &self.plan, self.head.vocab_size())?;
        let raw = self.raw_logits(hidden, rows);
        let mut logits = self.transform(&row, raw.clone())?;
        if let (Some(history), Fault::PenaltyOfOne) = (params.history, self.fault) {
            history.tokens().iter().for_each(|&token| logits[token as usize] -= 1.0);
        }
        if coarse {
            keep_by_coarse_deviation(sigma, &mut logits);
        }
        let seen = logits.clone();
        if let (Some(filters), false) = (&row.filters, dropped) {
            reference::filter(filters, self.seen.tokens().start, &mut logits)?;
            if self.fault == Fault::HigherKth && params.top_k > 0 {
                keep_higher_tokens(&seen, &mut logits);
            }
            let kept = logits.iter().filter(|l| **l > f32::NEG_INFINITY).count();
            if self.fault == Fault::TopPWithoutBoundary && kept > 1 {
                let least = logits.iter().copied().filter(|l| *l > f32::NEG_INFINITY).fold(f32::INFINITY, f32::min);
                if let Some(last) = logits.iter_mut().rfind(|l| **l == least) {
                    *last = f32::NEG_INFINITY;
                }
            }
        }
        let seed = match self.fault {
            Fault::RowNoise => params.seed.wrapping_add(r as u64),
            Fault::CallNoise => params.seed.wrapping_add(self.calls),
            Fault::SeedTruncated => params.seed & 0xffff_ffff,
            _ => params.seed,
        };
        let low = if self.fault == Fault::PositionTruncated { 0xffff_ffff } else { u64::MAX };
        let value = params.position.into();
        let position = RowError::OutOfRange { knob: Knob::Position, value, range: "below 2^56" };
        let noise = Noise::new(seed, params.position & low).ok_or(position)?;
        let first = self.seen.tokens().start;
        let drawing = Drawing { fault: self.fault, row, noise, temperature: params.temperature, logits, first };
        let draws = if row.without_replacement {
            drawing.list()?
        } else {
            (row.first_draw..row.first_draw + row.draws).map(|draw| drawing.draw(draw)).collect()
        };
        let mut mass = MassHistogram::default();
        for &logit in &drawing.logits {
            mass.push(if self.fault == Fault::Bf16Mass { bf16::from_f32(logit).to_f32() } else { logit });
        }
        let mut top = TopList::new(row.logprobs.unwrap_or(0) as usize, 0.0);
        let ranks = if self.fault == Fault::TopBeforeTemperature { &seen } else { &drawing.logits };
        for ((token, &logit), &rank) in (first..).zip(&drawing.logits).zip(ranks) {
            if logit > f32::NEG_INFINITY {
                top.push(Candidate { winner: Winner::new(rank, token), logit });
            }
        }
        out.push_row(draws, row.logprobs.is_some().then_some(&mass), top.as_slice());
        if let Some(most) = row.raw_logprobs {
            let of = if self.fault == Fault::ProcessedCalledRaw { &drawing.logits } else { &raw };
            let (mut mass, mut top) = (MassHistogram::default(), TopList::new(most as usize, 0.0));
            mass.extend_from_slice(of);
            for (token, &logit) in (first..).zip(of).filter(|(_, l)| **l > f32::NEG_INFINITY) {
                top.push(Candidate { winner: Winner::new(logit, token), logit });
            }
            let drawn: Vec<f32> = out.row(r)?.draws.iter().map(|d| of[(d.token - first) as usize]).collect();
            out.set_raw(r, &mass, top.as_slice(), drawn);
        }
        if row.logprobs.or(row.raw_logprobs).is_some() {
            let of = if row.raw_logprobs.is_some() { &raw } else { &drawing.logits };
            let logit = |t: u32| of.get((t - first) as usize).copied().unwrap_or(f32::NEG_INFINITY);
            let next = u32::from(self.fault == Fault::NextTokensLogit);
            let given: Vec<_> = row.logprob_token_ids.iter().map(|&t| (t, logit(t + next))).collect();
            let behind_ties = self.fault == Fault::RankBehindTies;
            let rank = |drawn: u32| {
                let own = logit(drawn);
                let before = |&(t, &l): &(u32, &f32)| l > own || (l == own && t != drawn && (behind_ties || t < drawn));
                1 + (first..).zip(of).filter(before).count() as u32
            };
            let ranks: Vec<_> = out.row(r)?.draws.iter().filter(|_| row.ranks).map(|d| rank(d.token)).collect();
            out.set_tokens(r, given, ranks);
        }
        if row.kept {
            let kept = (first..).zip(&drawing.logits).filter(|(_, l)| **l > f32::NEG_INFINITY).map(|(token, _)| token);
            out.set_kept(kept, mass.log_z(), self.head.vocab_size());
        }
        Ok(())
    }
}

impl PerturbedArgmax for Wrong<'_> {
    fn description(&self) -> Description {
        let pathwise = self.fault.algorithm() == ReferenceVariant::Tiled;
        let of = Reference::new(self.head, self.plan, self.fault.algorithm()).description();
        let can = of.capabilities;
        let capabilities = Capabilities {
            knobs: if self.fault == Fault::FiltersDropped { Knobs::NONE } else { can.knobs },
            exactness: if pathwise { Exactness::Pathwise } else { Exactness::InDistribution },
            without_replacement: pathwise,
            ..can
        };
        Description { capabilities, ..of }
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        match check_call(&input, rows, &self.shape(), &self.plan) {
            Err(SampleError::RowCount { .. }) if self.fault == Fault::RowCountIgnored => {}
            outcome => outcome?,
        }
        let mut hidden = vec![0.0; input.cols()];
        for (r, params) in rows.iter().enumerate().take(input.rows()) {
            input.row_to_f32(r, &mut hidden);
            let neighbour = rows.get(r ^ 1).filter(|_| self.fault == Fault::NeighboursBans).unwrap_or(params);
            let params = &RowParams { banned: neighbour.banned, ..*params };
            if let Err(error) = self.row(params, r, &hidden, input.rows(), out) {
                out.push_error(error);
            }
        }
        self.calls += 1;
        Ok(())
    }
}
