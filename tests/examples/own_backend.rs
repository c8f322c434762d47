//! A small custom backend, tested by the conformance suite.
//!
//! `cargo run --release -p flash-sampling-conformance --example own_backend [WORD]` runs all laws, or the laws whose
//! names contain WORD.
//!
//! The backend implements only the matmul. Core summarizes the logits of a row ([`RowSummary`]), and makes draws from
//! the summaries ([`Driver`]). A fast backend makes the summaries itself.

use flash_sampling_conformance::{BuildError, SamplerFactory, Trial, laws};
use flash_sampling_core::backend::{
    Adjustments, Batch, Driver, Request, RowSummary, Scan, Stage, StagedError, check_call, check_scan, first_invalid,
};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Capabilities, Description, Exactness, Head, Input, Knob, Knobs, Matrix, PerturbedArgmax, Plan, RowParams,
    SampleError, Samples, Shape, Variant,
};

struct Own<'w> {
    head: Head<'w>,
    plan: Plan,
    driver: Driver,
}

impl Scan for Own<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        check_scan(batch, requests, out, &self.shape(), &self.plan)?;
        let (first, width) = (self.head.tokens().start, batch.input.cols());
        let (mut hidden, mut weight) = (vec![0.0; width], vec![0.0; width]);
        let mut adjustments = Adjustments::default();
        adjustments.collect(batch.params);
        for (r, ((row, &request), out)) in batch.rows.iter().zip(requests).zip(out).enumerate() {
            let (Ok(row), false) = (row, request == Request::Skip) else { continue };
            let row = row.with_adjustments(adjustments.row(r));
            batch.input.row_to_f32(r, &mut hidden);
            // The matmul, then the head's bias, soft-cap and scale.
            let dot = |token| {
                self.head.weight().row_to_f32(self.head.weight_row(token), &mut weight);
                weight.iter().zip(&hidden).fold(0.0, |sum, (w, h)| sum + w * h)
            };
            let mut raw: Vec<f32> = self.head.tokens().map(dot).collect();
            self.head.transform(first, &mut raw);
            let mut logits = raw.clone();
            row.transform.apply(first, &mut logits);
            out.of(&row, request, first, &logits);
            out.of_raw(&row, request, first, &raw);
            // A bad logit is an error of its row only. A bad raw logit precedes a bad transformed one.
            let bad = |stage, logits: &[f32]| first_invalid(first, logits).map(|error| StagedError { stage, error });
            out.error = bad(Stage::Raw, &raw).or(bad(Stage::Transformed, &logits)).or(out.error);
        }
        Ok(())
    }
}

impl PerturbedArgmax for Own<'_> {
    fn description(&self) -> Description {
        let capabilities = Capabilities {
            backend: "own",
            variant: Variant::Tiled,
            exactness: Exactness::Pathwise,
            input: Input::Hidden,
            without_replacement: true,
            knobs: Knobs::ADJUSTMENTS.union(Knobs::FILTERS).union(Knobs::LOGPROBS).with(Knob::Kept),
            canonical: false,
            shadow: false,
        };
        Description { capabilities, shape: Shape::of(&self.head), plan: self.plan }
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let of = self.description();
        check_call(&input, rows, &of.shape, &of.plan)?;
        let mut driver = std::mem::take(&mut self.driver);
        let sampled = driver.sample(self, &of, input, rows, out);
        self.driver = driver;
        sampled
    }

    fn scan(&mut self) -> Option<&mut dyn Scan> {
        Some(self)
    }
}

struct Factory;

impl SamplerFactory for Factory {
    fn name(&self) -> String {
        "own/tiled".into()
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(ReferenceVariant::Tiled)
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        if plan.canonical {
            return Err(BuildError("canonical is not supported".into()));
        }
        Ok(Box::new(Own { head, plan, driver: Driver::default() }))
    }
}

fn main() {
    let word = std::env::args().nth(1).unwrap_or_default();
    for law in laws::ALL.iter().filter(|law| law.name.contains(&word)) {
        println!("{}", law.check(&Trial::new(&Factory)).unwrap_or_else(|failure| panic!("{failure}")));
    }
}
