{{/* The name of all objects of this release. */}}
{{- define "holdfast.name" -}}
{{- if contains "holdfast" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-holdfast" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{/* The labels by which objects find pods. Takes the root context and the component. */}}
{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* All labels of an object. */}}
{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "holdfast.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The addresses of all engines, between commas. The domain within the cluster is left to the pods' search list. */}}
{{- define "holdfast.engines" -}}
{{- $name := include "holdfast.name" . -}}
{{- range $number := until (int .Values.engine.replicas) -}}
{{- if $number }},{{ end }}{{ $name }}-engine-{{ $number }}.{{ $name }}-engine.{{ $.Release.Namespace }}.svc:{{ $.Values.engine.port }}
{{- end -}}
{{- end }}

{{/* Holdfast refuses an engine key that others can read, and a Secret's files belong to root, with the pod's group. So the
     key is copied to a volume in memory, where only its user can read it. */}}
{{- define "holdfast.keyContainer" -}}
- name: engine-key
  image: {{ include "holdfast.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -c, "umask 077 && cp /secret/{{ .Values.engineKey.entry }} /key/engine-key"]
  securityContext: {{- toYaml .Values.securityContext | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - {name: engine-secret, mountPath: /secret, readOnly: true}
    - {name: engine-key, mountPath: /key}
{{- end }}

{{- define "holdfast.keyVolumes" -}}
- name: engine-secret
  secret:
    secretName: {{ required "engineKey.existingSecret is empty: create a Secret with the key of the engines, as values.yaml shows" .Values.engineKey.existingSecret }}
- name: engine-key
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}

{{/* Options that differ from the defaults of all pods. */}}
{{- define "holdfast.pod" -}}
serviceAccountName: {{ include "holdfast.name" .root }}
automountServiceAccountToken: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
