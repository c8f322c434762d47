//! Scans: one pass for rows of every kind, whose summaries go to a merge of shards.

use crate::scan::engine::{CHUNK, Call, Engine, Rows};
use crate::scan::filter_state::PassKind;
use crate::scan::packed_input::PackedInput;
use crate::scan::row_state::RowState;
use crate::scan::tile::{Planned, Worker};
use flash_sampling_core::scan::by_place;
use flash_sampling_core::selection::Before;
use flash_sampling_core::{Draw, Head, Matrix, Request, RowError, RowSummary};

/// Plans a pass: `asked` gets its rows, `members` their numbers. Returns how many lists the pass fills.
fn plan<'a>(rows: &Rows<'a>, requests: &[Request<'_>], asked: &mut Rows<'a>, members: &mut Vec<usize>) -> usize {
    members.clear();
    let mut lists = 0;
    asked.extend(rows.iter().zip(requests).enumerate().map(|(r, (row, request))| {
        let ask = match request {
            // Raw logits of single tokens take no pass.
            Request::Skip | Request::RawLogits(_) => return Err(RowError::NoFiniteLogit),
            Request::Overview => PassKind::Summary,
            Request::Before(_) => PassKind::Before,
            Request::List { floor } => {
                lists += 1;
                PassKind::List { floor: *floor, slot: lists - 1 }
            }
        };
        let planned = (*row)?;
        if ask != PassKind::Summary && planned.row.filters.is_none() {
            return Err(RowError::NoFiniteLogit);
        }
        members.push(r);
        Ok(Planned { at: members.len() - 1, ask, ..planned })
    }));
    lists
}

impl Engine {
    /// One pass over the head's tokens for the rows with a request.
    pub(crate) fn scan(
        &mut self,
        head: &Head<'_>,
        hidden: &mut PackedInput,
        call: Call<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) {
        let dot = hidden.pack(self, head.weight().dtype(), &call.input);
        let adjustments = self.adjustments(call.rows);
        let rows = self.begin(call.rows, &adjustments, &call.can, head.vocab_size(), |_, _| 0.0);
        let mut asked = self.take_again();
        let mut members = core::mem::take(&mut self.members);
        let lists = plan(&rows, requests, &mut asked, &mut members);
        if !members.is_empty() {
            if members.len() < rows.len() {
                hidden.gather(dot, &call.input, &members);
            }
            self.known.begin(rows.len());
            let begin = |worker: &mut Worker| {
                worker.begin(&asked, None, true);
                for (state, request) in worker.rows.iter_mut().zip(requests) {
                    if let Request::Before(doubts) = request {
                        state.filter.doubts.clear();
                        state.filter.doubts.extend(doubts.iter().map(|doubt| Before::new(doubt.place)));
                    }
                }
                worker.lists.resize_with(lists.max(worker.lists.len()), Vec::new);
                worker.lists.iter_mut().for_each(Vec::clear);
            };
            let source = hidden.source(head, dot);
            self.for_parts(head.tokens(), CHUNK, begin, |worker, part, simd| {
                worker.evaluate(&source, &asked, part, simd);
            });
            self.gather(&asked);
        }
        for (r, (summary, request)) in out.iter_mut().zip(requests).enumerate() {
            match (request, &asked[r], &rows[r]) {
                (Request::Skip, ..) => {}
                (Request::RawLogits(_), _, Ok(_)) => summary.clear(),
                (_, Ok(planned), _) => self.write(r, planned, summary),
                (_, Err(_), row) => {
                    summary.clear();
                    summary.error = Some(row.err().unwrap_or(RowError::NoFiniteLogit));
                }
            }
        }
        self.write_raw_logits(head, hidden, &call.input, requests, out);
        self.trim();
        self.members = members;
        self.keep_again(asked);
        self.end(rows);
        self.keep(adjustments);
    }

    /// Writes the raw logits of requested tokens.
    fn write_raw_logits(
        &mut self,
        head: &Head<'_>,
        hidden: &mut PackedInput,
        input: &Matrix<'_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) {
        if !requests.iter().any(|request| matches!(request, Request::RawLogits(_))) {
            return;
        }
        let dot = hidden.pack(self, head.weight().dtype(), input);
        let source = hidden.source(head, dot);
        for (r, (summary, request)) in out.iter_mut().zip(requests).enumerate() {
            if let (Request::RawLogits(drawn), None) = (request, summary.error) {
                let own = drawn.iter().filter(|token| head.tokens().contains(token));
                summary.raw_logits.extend(own.map(|&t| (t, self.workers[0].raw_logits(&source, t)(r))));
            }
        }
    }

    /// Writes the summary of a row after the pass.
    fn write(&mut self, r: usize, planned: &Planned<'_>, summary: &mut RowSummary) {
        summary.begin(&planned.row);
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        let RowState { filter, mass, raw, weighed, invalid, best, top, has_finite, .. } = &mut first.rows[r];
        if let Some(invalid) = invalid {
            summary.error = Some(invalid.error);
            summary.stage = invalid.stage;
            return;
        }
        match planned.ask {
            PassKind::Summary => {
                if let Some((mass, top)) = raw.kept() {
                    summary.raw_mass.get_or_insert_default().clone_from(mass);
                    summary.raw_top.merge(top);
                }
                if planned.row.filters.is_none() {
                    if *has_finite {
                        summary.draws.extend(best.draws(&planned.row).map(Draw::from));
                    }
                    if let (Some(_), Some(mass)) = (planned.row.logprobs, mass) {
                        summary.mass.clone_from(mass);
                        summary.list.extend_from_slice(top.as_slice());
                    }
                    return;
                }
                filter.largest.finish();
                summary.list.extend_from_slice(filter.largest.as_slice());
                if let (true, Some(mass)) = (*weighed, mass) {
                    summary.mass.clone_from(mass);
                }
                summary.moments = filter.moments;
                summary.frontiers_mut().iter_mut().zip(&filter.frontiers).for_each(|(a, b)| a.clone_from(b));
            }
            PassKind::Before => {
                others.iter().for_each(|other| filter.merge_before(&other.rows[r].filter));
                summary.before.extend_from_slice(&filter.doubts);
            }
            PassKind::List { slot, .. } => {
                summary.list.append(&mut first.lists[slot]);
                others.iter_mut().for_each(|other| summary.list.append(&mut other.lists[slot]));
                summary.list.sort_unstable_by(by_place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CpuOptions;
    use crate::variants::Tiled;
    use flash_sampling_core::reference::{Reference, Scheme};
    use flash_sampling_core::{LogprobsMode, MassHistogram, Order, Plan, RowParams, Scan};

    const VOCAB: usize = 3000;
    const WIDTH: usize = 16;

    fn integers(n: usize, salt: u64) -> Vec<f32> {
        let mut state = salt;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % 7) as f32 - 3.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn raw(survey: &RowSummary) -> Option<&MassHistogram> {
        survey.raw_mass.as_ref().filter(|mass| !mass.is_empty())
    }

    /// Integer inputs, so that dot products are exact and every bit must agree.
    #[test]
    fn a_scan_is_the_plain_one_of_the_reference() {
        let weight = integers(VOCAB * WIDTH, 7);
        let head = Head::new(Matrix::new(&weight, VOCAB, WIDTH).unwrap()).unwrap().with_scale(0.125).unwrap();
        let base = RowParams { seed: 9, draws: 2, temperature: 0.75, ..RowParams::default() };
        let bias = [(700, f32::NEG_INFINITY), (1503, 9.0)];
        let rows = [
            RowParams { top_p: 0.9, ..base },
            base,
            RowParams { top_k: 70, logprobs: Some(5), logit_bias: &bias, ..base },
            RowParams { top_p: 0.99, top_n_sigma: 1.5, order: Order::LlamaCpp, ..base },
            RowParams { temperature: -1.0, top_k: 3, ..base },
            RowParams { kept: true, draws: 9, ..base },
            RowParams { mask: Some(&[]), top_k: 3, ..base },
            RowParams { mask: Some(&[]), logprobs: Some(4), logprobs_mode: LogprobsMode::Raw, ..base },
            RowParams { top_p: 0.8, logprobs: Some(5), logprobs_mode: LogprobsMode::Raw, ..base },
            RowParams { without_replacement: true, draws: 9, logprobs: Some(3), ..base },
            RowParams { temperature: 0.0, draws: 3, logprobs: Some(5), ..base },
        ];
        let input = integers(rows.len() * WIDTH, 3);
        let input = Matrix::new(&input, rows.len(), WIDTH).unwrap();
        let plan = Plan { max_rows: rows.len(), max_draws: 9, max_logprobs: Some(5), canonical: false };
        for tokens in [&[0u32][..], &[0, 1027, 2048, 2048]] {
            for shard in head.split(tokens) {
                let mut want = Reference::new(shard, plan, Scheme::Tiled);
                let options = CpuOptions { threads: Some(2), ..CpuOptions::default() };
                let mut tiled = Tiled::new(shard, plan, &options).unwrap();
                let mut ask = |requests: &[Request<'_>]| {
                    let (mut a, mut b) =
                        (vec![RowSummary::default(); rows.len()], vec![RowSummary::default(); rows.len()]);
                    Scan::scan(&mut want, input, &rows, requests, &mut a).unwrap();
                    Scan::scan(&mut tiled, input, &rows, requests, &mut b).unwrap();
                    for (r, (a, b)) in a.iter().zip(&b).enumerate() {
                        assert_eq!(a.error, b.error, "row {r}");
                        if a.error.is_none() {
                            assert_eq!((raw(a), a.raw_top.as_slice()), (raw(b), b.raw_top.as_slice()), "row {r}");
                            assert_eq!(a.raw_logits, b.raw_logits, "row {r}");
                            assert_eq!((&a.draws, &a.list, &a.mass), (&b.draws, &b.list, &b.mass), "row {r}");
                            assert_eq!((a.moments.to_words(), &a.before), (b.moments.to_words(), &b.before), "row {r}");
                            let finite = a.frontiers().iter().any(|f| !f.is_empty());
                            assert!(!finite || a.frontiers() == b.frontiers(), "row {r}");
                        }
                    }
                    b
                };
                let overview = ask(&[Request::Overview; 11]);
                let draws = |r: usize| overview[r].draws.len();
                assert_eq!(
                    (overview[1].error, draws(0), draws(1)),
                    (None, 0, if shard.tokens().is_empty() { 0 } else { 2 })
                );
                assert!(matches!(overview[4].error, Some(RowError::OutOfRange { .. })) && overview[6].list.is_empty());
                let place = flash_sampling_core::Place { logit: 1.0, token: 1600 };
                let before = [Before::new(place)];
                let mut requests = [Request::Skip; 11];
                requests[0] = Request::Before(&before);
                requests[2] = Request::List { floor: 0.5 };
                requests[5] = Request::List { floor: f32::NEG_INFINITY };
                requests[8] = Request::RawLogits(&[2, 2999, 1027, 2]);
                let told = ask(&requests);
                assert_eq!(
                    told[8].raw_logits.len(),
                    [2, 2999, 1027, 2].iter().filter(|t| shard.tokens().contains(t)).count()
                );
                assert!(overview[7].raw_top.as_slice().len() == 4.min(shard.tokens().len()));
                assert_eq!(told[5].list.len(), shard.tokens().len());
            }
        }
    }
}
