//! Surveys: what passes leave of rows with filters, handed over to a merge of shards instead of being decided here.

use crate::engine::{CHUNK, Call, Engine, Rows};
use crate::filtered::Ask;
use crate::hidden::Hidden;
use crate::state::RowState;
use crate::tile::{Planned, Worker};
use crate::tiled::Tiled;
use flash_sampling_core::selection::Before;
use flash_sampling_core::survey::{by_place, check_survey};
use flash_sampling_core::{
    Head, Inquiry, Matrix, PerturbedArgmax, RowError, RowParams, RowSurvey, SampleError, Survey,
};

/// What a pass is asked of each of `rows`, and which of them take part in it, `members`; how many lists it fills.
fn ask<'a>(rows: &Rows<'a>, inquiries: &[Inquiry<'_>], asked: &mut Rows<'a>, members: &mut Vec<usize>) -> usize {
    members.clear();
    let mut lists = 0;
    asked.extend(rows.iter().zip(inquiries).enumerate().map(|(r, (row, inquiry))| {
        let ask = match inquiry {
            // Raw logits of single tokens take no pass.
            Inquiry::Nothing | Inquiry::RawLogits(_) => return Err(RowError::NoFiniteLogit),
            Inquiry::Overview => Ask::Summary,
            Inquiry::Before(_) => Ask::Before,
            Inquiry::List { floor } => {
                lists += 1;
                Ask::List { floor: *floor, slot: lists - 1 }
            }
        };
        let planned = (*row)?;
        let raw = ask == Ask::Summary && planned.row.raw_logprobs.is_some();
        if !raw && planned.row.filters.is_none() {
            return Err(RowError::NoFiniteLogit);
        }
        members.push(r);
        Ok(Planned { at: members.len() - 1, ask, ..planned })
    }));
    lists
}

impl Engine {
    /// One pass over the head's tokens for the rows that an inquiry is made about.
    fn survey(
        &mut self,
        head: &Head<'_>,
        hidden: &mut Hidden,
        call: Call<'_, '_>,
        inquiries: &[Inquiry<'_>],
        out: &mut [RowSurvey],
    ) {
        let dot = hidden.pack(self, head.weight().dtype(), &call.input);
        let adjustments = self.adjustments(call.rows);
        let rows = self.begin(call.rows, &adjustments, &call.can, head.vocab_size(), |_, _| 0.0);
        let mut asked = self.take_again();
        let mut members = core::mem::take(&mut self.members);
        let lists = ask(&rows, inquiries, &mut asked, &mut members);
        if !members.is_empty() {
            if members.len() < rows.len() {
                hidden.gather(dot, &call.input, &members);
            }
            let begin = |worker: &mut Worker| {
                worker.begin(&asked, None);
                for (state, inquiry) in worker.rows.iter_mut().zip(inquiries) {
                    if let Inquiry::Before(doubts) = inquiry {
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
        for (r, (survey, inquiry)) in out.iter_mut().zip(inquiries).enumerate() {
            match (inquiry, &asked[r], &rows[r]) {
                (Inquiry::Nothing, ..) => {}
                (Inquiry::RawLogits(_), _, Ok(_)) => survey.clear(),
                (_, Ok(planned), _) => self.tell(r, planned, survey),
                (_, Err(_), row) => {
                    survey.clear();
                    survey.error = Some(row.err().unwrap_or(RowError::NoFiniteLogit));
                }
            }
        }
        self.tell_raw_logits(head, hidden, &call.input, inquiries, out);
        self.trim();
        self.members = members;
        self.keep_again(asked);
        self.end(rows);
        self.keep(adjustments);
    }

    /// Writes the raw logits of single tokens that were asked for.
    fn tell_raw_logits(
        &mut self,
        head: &Head<'_>,
        hidden: &mut Hidden,
        input: &Matrix<'_>,
        inquiries: &[Inquiry<'_>],
        out: &mut [RowSurvey],
    ) {
        if !inquiries.iter().any(|inquiry| matches!(inquiry, Inquiry::RawLogits(_))) {
            return;
        }
        let dot = hidden.pack(self, head.weight().dtype(), input);
        let source = hidden.source(head, dot);
        for (r, (survey, inquiry)) in out.iter_mut().zip(inquiries).enumerate() {
            if let (Inquiry::RawLogits(drawn), None) = (inquiry, survey.error) {
                let own = drawn.iter().filter(|token| head.tokens().contains(token));
                survey.raw_logits.extend(own.map(|&t| (t, self.workers[0].raw_logits(&source, t)(r))));
            }
        }
    }

    /// Writes what the pass found for a row.
    fn tell(&mut self, r: usize, planned: &Planned<'_>, survey: &mut RowSurvey) {
        survey.begin(&planned.row);
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        let RowState { filter, mass, raw, weighed, fault, .. } = &mut first.rows[r];
        survey.error = fault.map(|fault| fault.error);
        match planned.ask {
            Ask::Summary => {
                if let Some((mass, top)) = raw.kept() {
                    survey.raw_mass.get_or_insert_default().clone_from(mass);
                    survey.raw_top.merge(top);
                }
                if planned.row.filters.is_none() {
                    return;
                }
                filter.largest.finish();
                survey.list.extend_from_slice(filter.largest.as_slice());
                if let (true, Some(mass)) = (*weighed, mass) {
                    survey.mass.clone_from(mass);
                }
                survey.moments = filter.moments;
                survey.frontiers_mut().iter_mut().zip(&filter.frontiers).for_each(|(a, b)| a.clone_from(b));
            }
            Ask::Before => {
                others.iter().for_each(|other| filter.merge_before(&other.rows[r].filter));
                survey.before.extend_from_slice(&filter.doubts);
            }
            Ask::List { slot, .. } => {
                survey.list.append(&mut first.lists[slot]);
                others.iter_mut().for_each(|other| survey.list.append(&mut other.lists[slot]));
                survey.list.sort_unstable_by(by_place);
            }
        }
    }
}

impl Survey for Tiled<'_> {
    fn survey(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        inquiries: &[Inquiry<'_>],
        out: &mut [RowSurvey],
    ) -> Result<(), SampleError> {
        check_survey(&input, rows, inquiries, out, &self.shape(), &self.plan())?;
        let can = self.capabilities();
        let (head, engine, hidden) = self.parts_mut();
        engine.survey(head, hidden, Call { input, rows, can }, inquiries, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::CpuOptions;
    use flash_sampling_core::reference::{Reference, Scheme};
    use flash_sampling_core::{LogprobsMode, MassHistogram, Order, Plan};

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

    fn raw(survey: &RowSurvey) -> Option<&MassHistogram> {
        survey.raw_mass.as_ref().filter(|mass| !mass.is_empty())
    }

    /// Integer inputs, so that dot products are exact and every bit must agree.
    #[test]
    fn a_survey_is_the_plain_one_of_the_reference() {
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
        ];
        let input = integers(rows.len() * WIDTH, 3);
        let input = Matrix::new(&input, rows.len(), WIDTH).unwrap();
        let plan = Plan { max_rows: rows.len(), max_draws: 9, max_logprobs: Some(5), canonical: false };
        for tokens in [&[0u32][..], &[0, 1027, 2048, 2048]] {
            for shard in head.split(tokens) {
                let mut want = Reference::new(shard, plan, Scheme::Tiled);
                let options = CpuOptions { threads: Some(2), ..CpuOptions::default() };
                let mut tiled = Tiled::new(shard, plan, &options).unwrap();
                let mut ask = |inquiries: &[Inquiry<'_>]| {
                    let (mut a, mut b) =
                        (vec![RowSurvey::default(); rows.len()], vec![RowSurvey::default(); rows.len()]);
                    Survey::survey(&mut want, input, &rows, inquiries, &mut a).unwrap();
                    Survey::survey(&mut tiled, input, &rows, inquiries, &mut b).unwrap();
                    for (r, (a, b)) in a.iter().zip(&b).enumerate() {
                        assert_eq!(a.error, b.error, "row {r}");
                        if a.error.is_none() {
                            assert_eq!((raw(a), a.raw_top.as_slice()), (raw(b), b.raw_top.as_slice()), "row {r}");
                            assert_eq!(a.raw_logits, b.raw_logits, "row {r}");
                            assert_eq!((&a.list, &a.mass), (&b.list, &b.mass), "row {r}");
                            assert_eq!((a.moments.to_words(), &a.before), (b.moments.to_words(), &b.before), "row {r}");
                            let finite = a.frontiers().iter().any(|f| !f.is_empty());
                            assert!(!finite || a.frontiers() == b.frontiers(), "row {r}");
                        }
                    }
                    b
                };
                let overview = ask(&[Inquiry::Overview; 9]);
                assert_eq!(overview[1].error, Some(RowError::NoFiniteLogit));
                assert!(matches!(overview[4].error, Some(RowError::OutOfRange { .. })) && overview[6].list.is_empty());
                let place = flash_sampling_core::Place { logit: 1.0, token: 1600 };
                let before = [Before::new(place)];
                let mut inquiries = [Inquiry::Nothing; 9];
                inquiries[0] = Inquiry::Before(&before);
                inquiries[2] = Inquiry::List { floor: 0.5 };
                inquiries[5] = Inquiry::List { floor: f32::NEG_INFINITY };
                inquiries[8] = Inquiry::RawLogits(&[2, 2999, 1027, 2]);
                let told = ask(&inquiries);
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
