//! Files of row parameters: the JSON of [`SamplingParamsBuilder`], with the tokens of the sequence so far.

use crate::error::CommandError;
use crate::idle;
use crate::load::unique::Unique;
use crate::load::{LoadError, Problem};
use flash_sampling::{History, RowParams, SamplingParams, SamplingParamsBuilder};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::Path;

/// What one row is drawn with.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The parameters.
    pub params: SamplingParams,
    /// The sequence so far, if any of it was given.
    pub history: Option<History>,
}

/// What an object of a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// A row of `sample`.
    Rows,
    /// A sequence of `generate`, which has flags for what ends its text.
    Sequences,
}

impl Of {
    fn one(self) -> &'static str {
        match self {
            Of::Rows => "row",
            Of::Sequences => "sequence",
        }
    }

    /// The refusal of an array of another length.
    fn miscounted(self, objects: usize, rows: usize) -> String {
        let plural = |count| if count == 1 { "" } else { "s" };
        let flag = if self == Of::Sequences { " (--num-sequences)" } else { "" };
        let (one, several, rows_plural) = (self.one(), plural(objects), plural(rows));
        format!(
            "it has {objects} object{several} for {rows} {one}{rows_plural}{flag}; \
             one object without an array serves every {one}"
        )
    }

    /// The flag that a field is given by in its place, where the field asks for something.
    fn flag_instead(self, fields: &Map<String, Value>) -> Option<(&'static str, &'static str)> {
        let asks = |field: &str| match fields.get(field) {
            None | Some(Value::Null) => false,
            Some(Value::Array(all)) => !all.is_empty(),
            Some(Value::String(text)) => !text.is_empty(),
            Some(_) => true,
        };
        let flags = [("max_tokens", "--max-tokens"), ("stop", "--stop")];
        flags.into_iter().find(|(field, _)| self == Of::Sequences && asks(field))
    }
}

/// Reads the parameters of `rows` rows, for a vocabulary.
///
/// # Errors
/// What is wrong with the file, and with which of its rows.
pub fn open(path: &Path, of: Of, rows: usize, vocab_size: u32) -> Result<Vec<Request>, LoadError> {
    let text = std::fs::read_to_string(path).map_err(|error| Problem::Io(error).at(path))?;
    parse(&text, of, rows, vocab_size).map_err(|problem| problem.at(path))
}

/// Checks that a seed of the flags, if there is one, is some object's.
///
/// # Errors
/// Bad usage, where every object has a seed of its own.
pub fn needs_seed(requests: &[Request], flag: Option<&str>) -> Result<(), CommandError> {
    match flag {
        Some(flag) if requests.iter().all(|request| request.params.fields().seed.is_some()) => {
            Err(CommandError::usage(format!("{flag} means nothing: every object of --params has a seed")))
        }
        _ => Ok(()),
    }
}

/// Warns of what changes nothing in the rows of a file, once for each field: a request may rightly carry it.
pub fn tell_idle<'a>(path: &Path, of: Of, rows: impl IntoIterator<Item = RowParams<'a>>) {
    let mut told = BTreeSet::new();
    for (at, row) in rows.into_iter().enumerate() {
        for idle in idle::knobs(&row).into_iter().filter(|idle| told.insert(idle.field)) {
            tracing::warn!("{}: {} {at}: {}", path.display(), of.one(), idle.told(str::to_owned));
        }
    }
}

/// Parses one object, which stands for every row, or an array with one object a row. An object has the fields of
/// [`SamplingParamsBuilder`], and `prompt_token_ids` and `output_token_ids` where penalties need them.
///
/// # Errors
/// [`Problem::Format`], which names the row and the field.
pub fn parse(text: &str, of: Of, rows: usize, vocab_size: u32) -> Result<Vec<Request>, Problem> {
    let invalid = |reason| Problem::Format { format: "parameter", reason };
    serde_json::from_str::<Unique>(text).map_err(|error| invalid(error.to_string()))?;
    match serde_json::from_str(text).map_err(|error| invalid(error.to_string()))? {
        Value::Array(all) if all.len() != rows => Err(invalid(of.miscounted(all.len(), rows))),
        Value::Array(all) => {
            let of_row = |(row, value)| {
                request(value, of, vocab_size).map_err(|reason| invalid(format!("{} {row}: {reason}", of.one())))
            };
            all.into_iter().enumerate().map(of_row).collect()
        }
        value => Ok(vec![request(value, of, vocab_size).map_err(invalid)?; rows]),
    }
}

fn request(mut value: Value, of: Of, vocab_size: u32) -> Result<Request, String> {
    let Some(fields) = value.as_object_mut() else { return Err("it is no object".into()) };
    if let Some((field, flag)) = of.flag_instead(fields) {
        return Err(format!("{field} is given by {flag}"));
    }
    let mut tokens = |field: &str| match fields.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(list) => Vec::<u32>::deserialize(list).map(Some).map_err(|error| format!("{field}: {error}")),
    };
    let (prompt, output) = (tokens("prompt_token_ids")?, tokens("output_token_ids")?);
    let history = (prompt.is_some() || output.is_some()).then(|| {
        let mut history = History::new(&prompt.unwrap_or_default());
        history.extend(output.unwrap_or_default());
        history
    });
    let fields = SamplingParamsBuilder::deserialize(value).map_err(|error| error.to_string())?;
    let params = fields.build(vocab_size).map_err(|error| error.to_string())?;
    Ok(Request { params, history })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_object_stands_for_every_row_and_an_array_for_one_each() {
        let same =
            parse(r#"{"top_k": 5, "prompt_token_ids": [1, 2], "output_token_ids": [3]}"#, Of::Rows, 3, 100).unwrap();
        assert_eq!(same.len(), 3);
        assert_eq!(same[2].params.fields().top_k, 5);
        assert_eq!(same[2].history.as_ref().unwrap().tokens(), [1, 2, 3]);
        let each = parse(r#"[{"n": 1}, {"n": 2, "logit_bias": {"7": -1}}]"#, Of::Rows, 2, 100).unwrap();
        assert_eq!((each[1].params.fields().n, each[1].params.row(0, 0, None).logit_bias), (2, &[(7, -1.0)][..]));
        assert!(each[1].history.is_none());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, says) in [
            ("", "EOF"),
            ("7", "it is no object"),
            ("[{}]", "it has 1 object for 2 rows; one object without an array serves every row"),
            (r#"[{}, {"top_p": 0}]"#, "row 1: top_p is 0.0, but must be above 0 and at most 1"),
            (r#"[{}, {"n": 1, "n": 2}]"#, "duplicate field `n` at line 1 column"),
            (r#"{"logit_bias": {"1": 1, "1": 2}}"#, "duplicate field `1`"),
            (r#"{"prompt_token_ids": [1], "prompt_token_ids": [1]}"#, "duplicate field `prompt_token_ids`"),
            (r#"{"max_tokens": 7}"#, "max_tokens is no matter of the draw: only null is taken here"),
            (r#"[{}, {"seed": "one"}]"#, "row 1: seed: invalid type: string \"one\""),
            (r#"{"prompt_token_ids": ["a"]}"#, "prompt_token_ids: invalid type"),
            (r#"[{}, {"min_p": 1e-60}]"#, "row 1: min_p: 1e-60 rounds to 0 as a float32"),
            (r#"{"logit_bias": {"x": 1}}"#, "invalid"),
            (r#"[{}, {"stop_token_ids": [100]}]"#, "row 1: stop_token_ids names token 100, but there are 100 tokens"),
        ] {
            let error = parse(text, Of::Rows, 2, 100).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
