use super::*;
use flash_sampling_core::backend::{Candidate, LogitRank, by_logit_rank};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Head, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowParams};
use proptest::prelude::*;

const TOKENS: Range<u32> = 100..400;

const DRAWN: [u32; 3] = [250, 7, 399];
const RANKS: [LogitRank; 2] = [LogitRank { logit: 6.0, token: 250 }, LogitRank { logit: 2.5, token: 399 }];

/// Rows of every kind, with requests of every kind.
fn rows<'p>(points: &'p [PrefixMass]) -> [(RowParams<'static>, Request<'p>); 9] {
    let row = RowParams { seed: 5, draws: 3, ..RowParams::default() };
    let raw = RowParams { logprobs: Some(3), logprobs_mode: LogprobsMode::Raw, ..row };
    let top_p = RowParams { draws: 2, top_p: 0.8, temperature: 0.7, ..row };
    [
        (RowParams { logprobs: Some(2), ..row }, Request::Decide),
        (RowParams { without_replacement: true, ..row }, Request::Decide),
        (raw, Request::Decide),
        (RowParams { draws: 2, top_p: 0.8, top_n_sigma: 3.0, temperature: 0.7, ..raw }, Request::Overview),
        (RowParams { top_k: 5, ..row }, Request::Overview),
        (top_p, Request::PrefixMass { points, below: f32::NEG_INFINITY }),
        (top_p, Request::List { floor: 9.0 }),
        (raw, Request::Logits { tokens: &DRAWN, stage: Stage::Raw }),
        (top_p, Request::PrefixCount { ranks: &RANKS, stage: Stage::Transformed }),
    ]
}

fn points() -> [PrefixMass; 2] {
    [(6.0, 398), (2.5, 399)].map(|(logit, token)| PrefixMass::new(LogitRank { logit, token }))
}

fn checked(params: &RowParams<'static>) -> Row<'static> {
    let plan = Plan { max_draws: 3, max_logprobs: Some(3), ..Plan::default() };
    let weight = [0.0f32; 400];
    let head = Head::new(Matrix::new(&weight, 400, 1).unwrap()).unwrap();
    let can = Reference::new(head, plan, ReferenceVariant::Tiled).capabilities();
    params.check(&[], &can, &plan, 400).unwrap()
}

fn layout<'r, 'a>(row: &'r Row<'a>, request: &'r Request<'r>) -> Layout<'r, 'a> {
    Layout { row, request, by_mass: row.logprobs.is_some() }
}

fn summary(row: &Row<'_>, request: Request<'_>) -> RowSummary {
    let logits: Vec<f32> = TOKENS.map(|t| (t * 7919 % 97) as f32 / 8.0).collect();
    let mut summary = RowSummary::default();
    summary.of(row, request, TOKENS.start, &logits);
    summary.of_raw(row, request, TOKENS.start, &logits);
    summary.log_mass = Some(summary.mass.log_z()).filter(|_| row.logprobs.is_some());
    summary
}

fn message() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (params, request) in rows(&points()) {
        let row = checked(&params);
        encode_row(&mut bytes, layout(&row, &request), &summary(&row, request));
    }
    bytes
}

fn decode_from(bytes: &[u8], tokens: &Range<u32>, points: &[PrefixMass]) -> Result<Vec<RowSummary>, WireError> {
    let mut reader = Reader::new(bytes);
    let mut all = Vec::new();
    for (params, request) in rows(points) {
        let (row, mut out) = (checked(&params), RowSummary::default());
        out.begin(&row);
        // A damaged message may decode to a reason why there is no summary.
        let _ = decode_row(&mut reader, tokens, layout(&row, &request), &mut out)?;
        out.merge_lists(usize::MAX);
        all.push(out);
    }
    reader.finish().map(|()| all)
}

fn decode(bytes: &[u8]) -> Result<Vec<RowSummary>, WireError> {
    decode_from(bytes, &TOKENS, &points())
}

#[test]
fn bytes_carry_summaries() {
    for (r, (got, (params, request))) in decode(&message()).unwrap().iter().zip(rows(&points())).enumerate() {
        let row = checked(&params);
        let want = summary(&row, request);
        assert_eq!((&got.draws, &got.list, &got.mass), (&want.draws, &want.list, &want.mass), "row {r}");
        assert_eq!((got.moments, got.log_mass), (want.moments, want.log_mass), "row {r}");
        assert!(got.frontiers() == want.frontiers(), "row {r}");
        let raw = |s: &RowSummary| s.raw_mass.clone().filter(|mass| !mass.is_empty());
        assert_eq!((raw(got), got.raw_top.as_slice()), (raw(&want), want.raw_top.as_slice()), "row {r}");
        assert_eq!(raw(&want).is_some(), row.raw_logprobs.is_some() && request.is_overview());
        assert_eq!((&got.prefix_masses, &got.logits), (&want.prefix_masses, &want.logits), "row {r}");
        assert_eq!(got.prefix_counts, want.prefix_counts, "row {r}");
        let counts = [want.logits.len(), want.prefix_counts.len()];
        let parts = [want.draws.len(), want.list.len(), want.prefix_masses.len()].into_iter().chain(counts);
        assert!(parts.max() > Some(0), "row {r}");
    }
    assert!(decode_from(&message(), &TOKENS, &points()[..1]).is_err(), "another number of points than requested");
}

#[test]
fn bytes_carry_why_there_is_no_summary() {
    let (row, request) = (checked(&rows(&[])[0].0), Request::Overview);
    let layout = layout(&row, &request);
    let sent = |error, stage| {
        let (mut bytes, mut out, mut sent) = (Vec::new(), RowSummary::default(), RowSummary::default());
        sent.error = Some(StagedError { stage, error });
        encode_row(&mut bytes, layout, &sent);
        decode_row(&mut Reader::new(&bytes), &TOKENS, layout, &mut out).unwrap().map(|()| out.error)
    };
    for (stage, error) in
        [(Stage::Raw, RowError::NaN { token: 123 }), (Stage::Transformed, RowError::PositiveInfinity { token: 399 })]
    {
        assert_eq!(sent(error, stage), Ok(Some(StagedError { stage, error })));
    }
    let reason = sent(RowError::SupportTooSmall { draws: 2, available: 1 }, Stage::Raw).unwrap_err();
    assert!(reason.contains("2 draws"), "{reason}");
    let mut bytes = Vec::new();
    encode_row(&mut bytes, layout, &RowSummary::default());
    assert_eq!(bytes, [NO_MASS]);
}

#[test]
fn a_cut_or_longer_message_is_refused() {
    let mut bytes = message();
    for cut in 0..bytes.len() {
        assert_eq!(decode(&bytes[..cut]).unwrap_err(), WireError::Truncated { at: cut });
    }
    bytes.push(0);
    assert_eq!(decode(&bytes).unwrap_err(), WireError::Trailing { at: bytes.len() - 1, extra: 1 });
}

#[test]
fn a_token_of_another_shard_is_refused() {
    for tokens in [300..400, 100..200, 500..900] {
        assert!(matches!(decode_from(&message(), &tokens, &points()), Err(WireError::Invalid { .. })), "{tokens:?}");
    }
}

proptest! {
    /// Damaged bytes give an error, or summaries that can be merged; never a panic or a large allocation.
    #[test]
    fn damaged_messages_do_no_harm(damage in prop::collection::vec((0usize..20_000, any::<u8>()), 1..4)) {
        let mut bytes = message();
        let length = bytes.len();
        damage.into_iter().for_each(|(at, byte)| bytes[at % length] = byte);
        let own = |c: &Candidate| TOKENS.contains(&c.winner.token) && c.logit.is_finite();
        for summary in decode(&bytes).into_iter().flatten() {
            prop_assert!(summary.draws.iter().chain(&summary.list).all(own));
            prop_assert!(summary.list.is_sorted_by(|a, b| by_logit_rank(a, b).is_lt()));
            prop_assert!(!summary.mass.log_z().is_nan());
        }
    }
}
